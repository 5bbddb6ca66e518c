"""torch's own tests of DistributedDataParallel, with Grace's hook in it. Their ranks import this module."""

from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend

from tools.outside import put_in_hook

put_in_hook()


class TestDDP(TestDistBackend, DistributedTest._DistTestBase):
    """The tests, whose ranks are new processes."""

    def setUp(self) -> None:
        """Start the ranks of a test."""
        super().setUp()
        self._spawn_processes()
