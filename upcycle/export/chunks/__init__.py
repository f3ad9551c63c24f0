"""A decoder cut into packages that a device takes."""
