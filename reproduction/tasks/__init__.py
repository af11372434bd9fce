"""The public data sets of the paper as tasks, registered beside those of the library.

Importing `reproduction` registers them, so that experiments and, in a checkout, `dpsur
train --task mnist` find them by name.
"""

from dpsur.tasks import TASKS
from reproduction.tasks.cifar10 import CIFAR10_TASK
from reproduction.tasks.imdb import IMDB_HASHED_TASK, IMDB_TASK, IMDB_WORDS_TASK
from reproduction.tasks.mnist import FMNIST_TASK, MNIST_TASK

for task in (MNIST_TASK, FMNIST_TASK, CIFAR10_TASK, IMDB_TASK, IMDB_WORDS_TASK, IMDB_HASHED_TASK):
    TASKS[task.name] = task
