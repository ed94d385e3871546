{{- define "ballast.name" -}}
{{ .Values.fullnameOverride | default "ballast" }}
{{- end }}

{{- define "ballast.selector" -}}
app.kubernetes.io/name: ballast
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- define "ballast.labels" -}}
{{ include "ballast.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "ballast.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{ .Values.serviceAccount.name | default (include "ballast.name" .) }}
{{- else -}}
{{ required "serviceAccount.name is needed without serviceAccount.create" .Values.serviceAccount.name }}
{{- end -}}
{{- end }}

{{- define "ballast.image" -}}
{{- with .Values.image -}}
{{- if and .digest .tag }}{{ fail "image.tag and image.digest are both set, and nodes would pull the digest: set one of them, and the other one to an empty text" }}{{ end -}}
{{- if .digest -}}
{{ .repository }}@{{ .digest }}
{{- else -}}
{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}
{{- end -}}
{{- end -}}
{{- end }}

{{- /* The agent's configuration file. It has no kubeconfig: the pod has the credentials of its ServiceAccount, and no such file. */ -}}
{{- define "ballast.config" -}}
{{- $own := dict "apiVersion" "kubeproxy.config.k8s.io/v1alpha1" "kind" "KubeProxyConfiguration" -}}
{{- with .Values.config.clientConnection -}}
{{- $own = set $own "clientConnection" (omit . "kubeconfig") -}}
{{- end -}}
{{- merge $own (omit .Values.config "apiVersion" "kind" "hostnameOverride" "clientConnection") | toYaml -}}
{{- end }}

{{- /* The port of an address; the arguments are (list address default-port), because the address may be empty. */ -}}
{{- define "ballast.port" -}}
{{- regexFind "[0-9]+$" (first . | default (printf ":%d" (last .))) -}}
{{- end }}

{{- /* The fields `host` and `port` of the probes. By default, the kubelet asks the node's address, on which no server of a single other address answers. */ -}}
{{- define "ballast.probe" -}}
{{- $host := regexReplaceAll ":[0-9]+$" (.Values.config.healthzBindAddress | default "") "" | trimPrefix "[" | trimSuffix "]" -}}
{{- /* Zeros stand for all addresses. */ -}}
{{- if not (regexMatch "^[0:.]*$" $host) -}}
host: {{ $host | quote }}
{{ end -}}
port: {{ include "ballast.port" (list .Values.config.healthzBindAddress 10256) }}
{{- end }}

{{- define "ballast.apiServerConfigMap" -}}
{{- .Values.apiServer.configMap | default (printf "%s-api-server" (include "ballast.name" .)) -}}
{{- end }}

{{- /* Names or addresses of the API servers, as JSON. */ -}}
{{- define "ballast.apiServerHosts" -}}
{{- with .Values.apiServer -}}
{{- if and .host .hosts }}{{ fail "apiServer.host and apiServer.hosts are both set: move the host to the list" }}{{ end -}}
{{- if .hosts }}{{ toJson .hosts }}
{{- else }}{{ list (required "apiServer.host or apiServer.hosts is needed: addresses of the API servers that are not a Service's" .host) | toJson }}
{{- end -}}
{{- end -}}
{{- end }}

{{- /* URLs of the API servers, for --master. */ -}}
{{- define "ballast.master" -}}
{{- $urls := list -}}
{{- range include "ballast.apiServerHosts" . | fromJsonArray -}}
{{- $host := and (contains ":" .) (not (hasPrefix "[" .)) | ternary (printf "[%s]" .) . -}}
{{- $urls = append $urls (printf "https://%s:%d" $host (int $.Values.apiServer.port)) -}}
{{- end -}}
{{- join "," $urls -}}
{{- end }}

{{- define "ballast.configMount" -}}
- name: config
  mountPath: /etc/ballast/config.yaml
  # The kubelet does not update a file that is mounted by subPath. A changed ConfigMap needs new pods: the rollout stops at the first node that rejects it.
  subPath: config.yaml
  readOnly: true
{{- end }}

{{- /* Mounts of folders of the node; only a privileged container may propagate its own mounts to the node. */ -}}
{{- define "ballast.mounts" -}}
{{- $root := first . }}{{ $propagation := last . -}}
- name: bpffs
  mountPath: {{ $root.Values.paths.bpffs }}
  {{- if $root.Values.paths.propagate }}
  mountPropagation: {{ $propagation }}
  {{- end }}
- name: cgroup
  mountPath: {{ $root.Values.paths.cgroup }}
  {{- /* At /sys/fs/cgroup, cgroup2 is already mounted, except on nodes with only cgroup v1. */}}
  {{- if $root.Values.paths.propagate }}
  mountPropagation: {{ eq $root.Values.paths.cgroup "/sys/fs/cgroup" | ternary "HostToContainer" $propagation }}
  {{- end }}
  {{- if ne $propagation "Bidirectional" }}
  readOnly: true
  {{- end }}
{{- end }}

{{- /* Variables of the agent from values with names of their own. */ -}}
{{- define "ballast.values" -}}
{{- $own := dict
  "SOCKET_LB" .Values.socketLb
  "SOCKET_DROP" .Values.socketDrop
  "NODE_PORT_BIND" .Values.nodePortBind
  "FORWARDING_MODE" .Values.forwardingMode
  "EJECTION" .Values.ejection
  "TENANT_ANNOTATIONS" (join "," .Values.tenantAnnotations | default "none")
  "SLOW_START" .Values.slowStart
  "GATE_SERVICE" (ternary (printf "%s/%s-agents" .Release.Namespace (include "ballast.name" .)) "" .Values.gate)
  "PAGE" .Values.page
  "LOG_LEVEL" .Values.logLevel
  "ALGORITHM" .Values.algorithm
  "MAX_FLOWS" (eq (int64 .Values.maxFlows) 0 | ternary "" (int64 .Values.maxFlows | toString))
  "UPLINKS" .Values.uplinks
  "XDP" .Values.xdp
-}}
{{- $small := dict
  "MAX_SERVICES" "2048" "MAX_FRONTENDS" "4096" "MAX_SLOTS" "32768" "MAX_MAGLEV_WORDS" "65536" "MAX_BACKENDS" "16384"
  "MAX_FLOWS" "16384" "MAX_SOCKETS" "8192" "MAX_SOURCE_RANGES" "4096"
-}}
{{- range $name, $value := eq .Values.preset "small" | ternary $small dict -}}
{{- if not (or (get $own $name) (hasKey $.Values.settings (printf "BALLAST_%s" $name))) -}}
{{- $_ := set $own $name $value -}}
{{- end -}}
{{- end -}}
{{- $list := list -}}
{{- range $name, $value := $own -}}
{{- if $value -}}
{{- $list = append $list (dict "name" (printf "BALLAST_%s" $name) "value" (toString $value)) -}}
{{- end -}}
{{- end -}}
{{- toYaml $list -}}
{{- end }}

{{- define "ballast.env" -}}
- name: BALLAST_HOSTNAME_OVERRIDE
  valueFrom:
    fieldRef:
      fieldPath: spec.nodeName
- name: BALLAST_BPFFS
  value: {{ .Values.paths.bpffs }}
{{- with .Values.paths.cgroupRoot }}
- name: BALLAST_CGROUP_ROOT
  value: {{ . }}
{{- end }}
{{- with .Values.config.metricsBindAddress }}
# For the commands in this container, which do not read the configuration file.
- name: BALLAST_METRICS_BIND_ADDRESS
  value: {{ . | quote }}
{{- end }}
{{- with .Values.manifests }}
- name: BALLAST_MANIFESTS
  value: {{ . | quote }}
{{- end }}
{{- range $name, $value := .Values.settings }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* The resources of a container; the argument is the value. */ -}}
{{- define "ballast.resources" -}}
{{- with . -}}
resources:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- /* Security profiles of a container that is not privileged. */ -}}
{{- define "ballast.profiles" -}}
seccompProfile:
  {{- toYaml .Values.seccompProfile | nindent 2 }}
appArmorProfile:
  {{- toYaml .Values.appArmorProfile | nindent 2 }}
{{- end }}

{{- /* Fields that the pods of the agent and of the cleanup have in common. */ -}}
{{- define "ballast.pod" -}}
hostNetwork: true
dnsPolicy: Default
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
terminationGracePeriodSeconds: 10
{{- end }}

{{- define "ballast.volumes" -}}
- name: bpffs
  hostPath:
    path: {{ .Values.paths.bpffs }}
    type: DirectoryOrCreate
- name: cgroup
  hostPath:
    path: {{ .Values.paths.cgroup }}
    type: DirectoryOrCreate
{{- end }}
