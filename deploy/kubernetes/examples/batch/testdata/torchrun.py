# torchrun, with the log messages of the rendezvous.
import logging
import sys

from torch.distributed.run import main

logging.basicConfig(level=logging.DEBUG)
main(sys.argv[1:])
