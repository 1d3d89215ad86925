"""What a compiled graph does when it is called: which plan fits the call (`signature`, `guard`), and the kinds of plans."""
