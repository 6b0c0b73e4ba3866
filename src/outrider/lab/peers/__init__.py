"""Other engines, to be measured beside ours and to be proven by our proofs."""
