"""What goes where: the intersection of two descriptions. Pure functions on integers (numpy and stdlib only).

Enters: layouts of two engines, block tables, token ranges. Leaves: rows to copy, and what they cost. It knows no peer,
no memory and no model:

    source, target = describe(model, shape_a, 0), describe(model, shape_b, 0)     # or layouts of your own
    found = route(source, target)                                                 # who sends which box to whom
    program = bind(found.between(0, 0), source[0], target[0])                     # once per pair of ranks
    rows = copies_for(program, source_tables, target_tables, [TokenRange(0, n)])  # once per request

From the bottom: `description` (layouts, made by hand or by `describe`), `routing`, `programs`, and on these `strategy`
(what the rows cost), `digests` (what is compared afterwards) and `slots` (what goes through staging memory).
"""
