{{- define "kvferry.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{/* Short enough for what is appended. */}}
{{- define "kvferry.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- $name := include "kvferry.name" . -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* What selects a release's pods. It never changes: a Deployment's selector cannot. */}}
{{- define "kvferry.selector" -}}
app.kubernetes.io/name: {{ include "kvferry.name" .root | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- end -}}

{{/* Of pods: what changes here restarts engines, so the chart's own version is not there. */}}
{{- define "kvferry.podLabels" -}}
{{ include "kvferry.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/part-of: kvferry
{{- end -}}

{{- define "kvferry.labels" -}}
{{ include "kvferry.podLabels" . }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "kvferry.tokenSecret" -}}
{{- .Values.token.existingSecret | default (printf "%s-token" (include "kvferry.fullname" .)) -}}
{{- end -}}

{{/* root, image, and the repository if it has none. */}}
{{- define "kvferry.image" -}}
{{- $name := printf "%s:%s" (.image.repository | default .repository) (.image.tag | default .root.Chart.AppVersion) -}}
{{- with .root.Values.image.registry }}{{ trimSuffix "/" . }}/{{ end }}{{ $name }}{{ with .image.digest }}@{{ . }}{{ end -}}
{{- end -}}

{{/* The number of replicas: null is the default, and 0 is 0. */}}
{{- define "kvferry.replicas" -}}
{{- if kindIs "invalid" .values.replicas }}{{ .default }}{{ else }}{{ int .values.replicas }}{{ end -}}
{{- end -}}

{{/* Under autoscaling: as many as there are now. Without a number a Deployment that had one would go down to one. */}}
{{- define "kvferry.liveReplicas" -}}
{{- $live := lookup "apps/v1" "Deployment" .root.Release.Namespace .name | default dict -}}
{{- with dig "spec" "replicas" "" $live }}{{ int . }}{{ end -}}
{{- end -}}

{{/* What a pod needs to end in order. Once a drain is over, open answers and an engine's server have some seconds. */}}
{{- define "kvferry.neededGrace" -}}
{{- add .root.Values.preStopSeconds .values.drainTimeoutSeconds 15 -}}
{{- end -}}

{{- define "kvferry.grace" -}}
{{- $given := .values.terminationGracePeriodSeconds -}}
{{- if kindIs "invalid" $given }}{{ include "kvferry.neededGrace" . }}{{ else }}{{ int $given }}{{ end -}}
{{- end -}}

{{/* A pod template's metadata; root, component, values, and the role of an engine. */}}
{{- define "kvferry.podMetadata" -}}
labels:
  {{- with .values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- include "kvferry.podLabels" . | nindent 2 }}
  {{- with .role }}
  kvferry.io/role: {{ . }}
  {{- end }}
{{- $annotations := deepCopy .values.podAnnotations -}}
{{- if and .role .root.Values.token.value -}}
{{- $_ := set $annotations "checksum/token" (.root.Values.token.value | trim | sha256sum) -}}
{{- end -}}
{{- with $annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Where a pod runs, and what else does not depend on what it does. */}}
{{- define "kvferry.placement" -}}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* The resources of an engine, with the devices of RDMA. */}}
{{- define "kvferry.engineResources" -}}
{{- $resources := deepCopy .values.resources -}}
{{- $rdma := .root.Values.engines.rdma -}}
{{- if $rdma.resource -}}
{{- $resources = mergeOverwrite $resources (dict "limits" (dict $rdma.resource (int $rdma.count | toString))) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}
