"""Several stores at once: transactions that commit in all of them or in none."""
