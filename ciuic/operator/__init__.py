"""Operator for Kubernetes: daemons on pools of nodes, and snapshots of the files of jobs (docs/kubernetes.md).

Two programs, both `ciuic-operator`. The *controller*, one in a cluster, makes a ConfigMap and a DaemonSet of each SnapshotPolicy, and
finds out on which nodes the pods of a TrainingSnapshot's job run. The *agent*, in each daemon's pod, has the daemon of its node take the
snapshot and writes what became of it into the status. So no program needs the right to run commands in pods, or to change pods.

Needs Kopf (``pip install 'ciuic[operator]'``) and Python 3.11.
"""
