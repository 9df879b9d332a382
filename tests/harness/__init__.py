"""What the tests stand on: forked ranks, counted collectives, the rules of the architecture."""
