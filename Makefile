.PHONY: setup demo test lint bench faults screenshots gpu
setup demo test lint bench faults screenshots gpu:
	@python3 tasks.py $@
