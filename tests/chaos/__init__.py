"""What befalls runs and their users: kills, lost hosts, damage, mistakes. bench/survive.py prints the figures."""
