"""The positions of the tensor and the group in the arguments of torch's collectives."""

# name: the positions of (the tensor or object, the group)
COLLECTIVE_ARGUMENTS: dict[str, tuple[int | None, int | None]] = {
    "all_reduce": (0, 2),
    "reduce": (0, 3),
    "broadcast": (0, 2),
    "all_gather": (1, 2),
    "all_gather_into_tensor": (1, 2),
    "all_gather_single": (1, 2),
    "all_gather_object": (1, 2),
    "gather": (0, 3),
    "gather_object": (0, 3),
    "scatter": (0, 3),
    "scatter_object_list": (1, 3),
    "broadcast_object_list": (0, 2),
    "reduce_scatter": (0, 3),
    "reduce_scatter_tensor": (0, 3),
    "reduce_scatter_single": (0, 3),
    "all_to_all": (1, 2),
    "all_to_all_single": (1, 4),
    "barrier": (None, 0),
    "monitored_barrier": (None, 0),
    "send": (0, 2),
    "recv": (0, 2),
    "isend": (0, 2),
    "irecv": (0, 2),
    "send_object_list": (0, 2),
    "recv_object_list": (0, 2),
    "batch_isend_irecv": (None, None),
}
# name: the position of the root, or of the other rank
PEERS = {
    **dict.fromkeys(("broadcast", "broadcast_object_list", "reduce"), 1),
    **dict.fromkeys(("gather", "gather_object", "scatter", "scatter_object_list"), 2),
    **dict.fromkeys(("send", "recv", "isend", "irecv", "send_object_list", "recv_object_list"), 1),
}
# These have no sequence number.
POINT_TO_POINT = {
    *("send", "recv", "isend", "irecv", "send_object_list", "recv_object_list"),
    "batch_isend_irecv",
}
