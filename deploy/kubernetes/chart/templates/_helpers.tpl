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

{{/* The permissions of both containers. */}}
{{- define "gpreempt.securityContext" -}}
# Root of the node, without a user namespace: for /dev/kfd, debugfs, the runtime's socket, and the processes of other
# users.
runAsUser: 0
runAsGroup: 0
runAsNonRoot: false
# It writes only /run/gpreempt, which is mounted.
readOnlyRootFilesystem: true
{{- if not .Values.deviceResources }}
# To open /dev/kfd, /dev/dri/renderD* and /dev/kmsg: an unprivileged container may not open devices of the node, mounted
# or not, unless a device plugin adds them (deviceResources). It also includes everything listed below for the other case,
# the host's cgroup namespace, which rules by cgroup and the freezer need, and CAP_SYS_ADMIN, without which the driver
# does not report evictions of other processes (SMI_UNAVAILABLE).
privileged: true
{{- else }}
privileged: false
allowPrivilegeEscalation: false
capabilities:
  drop: [ALL]
  add:
    # Trace and read the processes of all users (dbgtrap, criu, backlogs), copy their /dev/kfd (criu).
    - SYS_PTRACE
    # Read /proc/PID/environ, fd and maps of other users, which root without it may not.
    - DAC_READ_SEARCH
    # Change the group of the socket to socketGroup.
    - CHOWN
    # Read /dev/kmsg, where the kernel reports GPU errors: for the breakers.
    - SYSLOG
    {{- if has "criu" .Values.mechanisms }}
    # The driver's pause for a checkpoint.
    - CHECKPOINT_RESTORE
    {{- end }}
    {{- if has "freezer" .Values.mechanisms }}
    # SIGSTOP and SIGCONT for processes of other users. Cgroups cannot be frozen: those of other containers are not
    # visible from a cgroup namespace, and only privileged containers are in the host's.
    - KILL
    {{- end }}
# The runtime's filter permits ptrace, process_vm_readv and pidfd_getfd for a container with SYS_PTRACE.
seccompProfile:
  type: RuntimeDefault
# The runtimes' AppArmor profile permits tracing processes with the same profile only.
appArmorProfile:
  type: Unconfined
# SELinux: the type of containers that manage their node. container_t may not trace, nor open /dev/kmsg.
seLinuxOptions:
  type: spc_t
{{- end }}
{{- end }}
