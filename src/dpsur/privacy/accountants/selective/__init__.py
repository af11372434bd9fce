"""What accepted updates of a selective release cost, from above and from below.

`divergence` returns a certified upper and an attained lower value of the Rényi divergence of one
update; `profile.block_profiles` bounds the hockey-stick divergences of a block of them.
docs/privacy.md has the proofs.
"""
