"""What it should cost: what a submission launches, what its tiles need, lowering, and the roofline."""
