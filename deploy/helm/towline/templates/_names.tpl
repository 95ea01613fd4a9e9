{{/*
Name of the release's objects: the release's, with the chart's if it is not in it. With the name of a gateway it has at most 52
characters, which leaves room for the hash that a StatefulSet adds.
*/}}
{{- define "towline.fullname" -}}
{{- $name := ternary .Release.Name (printf "%s-%s" .Release.Name .Chart.Name) (contains .Chart.Name .Release.Name) -}}
{{- .Values.fullnameOverride | default (replace "." "-" $name | trunc 29 | trimSuffix "-") -}}
{{- end -}}

{{/* Labels that select the pods of a component; of all components without one. Takes a list: root, component. */}}
{{- define "towline.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ $root.Chart.Name }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
{{- with index . 1 }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- end -}}

{{/* Labels of an object. Takes a list: root, component or nothing. */}}
{{- define "towline.labels" -}}
{{- $root := index . 0 -}}
{{ include "towline.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | quote }}
{{- end -}}

{{- define "towline.image" -}}
{{- $image := .Values.image -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $image.repository $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $image.repository (default .Chart.AppVersion $image.tag) -}}
{{- end -}}
{{- end -}}

{{/* Name, with its port, that resolves to all agents of the release. */}}
{{- define "towline.agents" -}}
{{- printf "%s-agents.%s.svc.%s:7171" (include "towline.fullname" .) .Release.Namespace .Values.clusterDomain -}}
{{- end -}}
