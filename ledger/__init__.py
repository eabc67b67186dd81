"""What run records say together: which runs there are, whether two may be compared, which mode pays, what was reproduced."""
