"""What is asked: the contract, the grouped-padding layout, inputs, routings, the truth, and what a submission is."""
