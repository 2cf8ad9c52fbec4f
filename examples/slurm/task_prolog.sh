#!/bin/bash
# TaskProlog of slurm.conf: makes the tasks of one partition offline where no rule does. Slurm adds what it prints after
# "export" to the environment of the task.
if [[ ${SLURM_JOB_PARTITION:-} == batch ]]; then
	echo export GPREEMPT_CLASS=offline
fi
