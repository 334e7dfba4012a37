"""DeepSpeed's configuration files: what jzero makes of each key; and DeepSpeed's estimators of memory.

Read `conversion` (the way of a file), `source` and `parsing`, `schema` (a row for each key) in the nouns of `key` and
`kinds`, `auto_values`, `facts` and `rules` (what else holds), `report`, `optimizers` and `schedules`;
then `estimator` and `formulas`.
"""
