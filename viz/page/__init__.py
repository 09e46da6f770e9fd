"""Interactive page of a plan: `plan_page` writes it, `page_tables` tells its program what the planner knows.

The program is JavaScript: `main.js` builds the page, `view`, `timeline`, `memory` and `overlay` draw, `plan`, `layout`,
`flow`, `graph`, `early`, `times` and `judge` are a small twin of the planner, `why` explains idle time, `play` and
`compile` are the playground, and `door` refuses the files and links that the planner refuses. `make page` bundles them
into `built.js`, which is what is shipped with the page. Imports `instruction_colours` and the planner; no matplotlib.
"""
