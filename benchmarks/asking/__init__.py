"""What `attention.py` measures: who is asked, and how time and memory are taken."""
