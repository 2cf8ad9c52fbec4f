{{- define "gpreempt.selector" -}}
app.kubernetes.io/name: gpreempt
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "gpreempt.labels" -}}
{{ include "gpreempt.selector" . }}
app.kubernetes.io/component: daemon
{{- end }}

{{/* The config file: the chart's or the user's, both templates. */}}
{{- define "gpreempt.config" -}}
{{ tpl (.Values.config | default (.Files.Get "files/gpreemptd.yaml")) . }}
{{- end }}

{{/* What both containers may do. */}}
{{- define "gpreempt.securityContext" -}}
# Root of the node, without a user namespace: the owner of /dev/kfd, debugfs and the runtime's socket, and of the
# rights over other users' processes.
runAsUser: 0
runAsGroup: 0
runAsNonRoot: false
# It writes /run/gpreempt, which is mounted, and nothing else.
readOnlyRootFilesystem: true
{{- if not .Values.deviceResources }}
# To open /dev/kfd, /dev/dri/renderD* and /dev/kmsg: a container that is not privileged may not open devices of the
# node, mounted or not, unless a device plugin gives them (deviceResources). It also brings all that stands here for the
# other case, the host's cgroup namespace, without which rules by cgroup match nothing and the freezer freezes none, and
# CAP_SYS_ADMIN, without which the driver tells of no evictions of other processes (SMI_UNAVAILABLE).
privileged: true
{{- else }}
privileged: false
allowPrivilegeEscalation: false
capabilities:
  drop: [ALL]
  add:
    # Trace and read the processes of all users (dbgtrap, criu, backlogs), copy their /dev/kfd (criu).
    - SYS_PTRACE
    # Read /proc/PID/environ, fd and maps of other users: they are not root's, and root without it is anybody.
    - DAC_READ_SEARCH
    # Give the socket to socketGroup.
    - CHOWN
    # Read /dev/kmsg, where the kernel tells of GPUs in trouble: the breakers.
    - SYSLOG
    {{- if has "criu" .Values.mechanisms }}
    # The driver's pause for a checkpoint.
    - CHECKPOINT_RESTORE
    {{- end }}
    {{- if has "freezer" .Values.mechanisms }}
    # SIGSTOP and SIGCONT for processes of other users. There is no freezing of cgroups: those of others are not seen
    # from a cgroup namespace, and only privileged containers are in the host's.
    - KILL
    {{- end }}
# The runtime's own filter lets ptrace, process_vm_readv and pidfd_getfd pass for a container with SYS_PTRACE.
seccompProfile:
  type: RuntimeDefault
# The runtimes' AppArmor profile allows to trace processes of the same profile only: no job under another one, or none.
appArmorProfile:
  type: Unconfined
# SELinux: the type of containers that look after their node. container_t may trace no one, nor open /dev/kmsg.
seLinuxOptions:
  type: spc_t
{{- end }}
{{- end }}
