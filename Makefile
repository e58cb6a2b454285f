.PHONY: setup demo test lint bench faults docs site screenshots gpu
setup demo test lint bench faults docs site screenshots gpu:
	@python3 tasks.py $@
