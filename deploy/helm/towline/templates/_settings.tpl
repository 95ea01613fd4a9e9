{{/* A value in TOML; fields that are null are left out. Strings, numbers and booleans are as in JSON; a map becomes an inline table. */}}
{{- define "towline.toml.value" -}}
{{- if kindIs "map" . -}}
{{- $fields := list -}}
{{- range $key, $value := . -}}
{{- if not (kindIs "invalid" $value) -}}
{{- $fields = append $fields (printf "%s = %s" (include "towline.toml.key" $key) (include "towline.toml.value" $value)) -}}
{{- end -}}
{{- end -}}
{ {{ join ", " $fields }} }
{{- else if kindIs "slice" . -}}
{{- $values := list -}}
{{- range . -}}
{{- $values = append $values (include "towline.toml.value" .) -}}
{{- end -}}
[{{ join ", " $values }}]
{{- else -}}
{{ toJson . }}
{{- end -}}
{{- end -}}

{{- define "towline.toml.key" -}}
{{- if regexMatch "^[A-Za-z0-9_-]+$" . }}{{ . }}{{ else }}{{ toJson . }}{{ end -}}
{{- end -}}

{{/* The map of settings as the TOML file of an agent. */}}
{{- define "towline.toml" -}}
{{- range $key, $value := . }}
{{- if not (or (kindIs "invalid" $value) (kindIs "map" $value) (and (kindIs "slice" $value) (kindIs "map" (first $value)))) }}
{{ $key }} = {{ include "towline.toml.value" $value }}
{{- end }}
{{- end }}
{{- range $key, $value := . }}
{{- if kindIs "map" $value }}

[{{ $key }}]
{{- range $field, $inner := $value }}
{{- if not (kindIs "invalid" $inner) }}
{{ include "towline.toml.key" $field }} = {{ include "towline.toml.value" $inner }}
{{- end }}
{{- end }}
{{- else if and (kindIs "slice" $value) (kindIs "map" (first $value)) }}
{{- range $value }}

[[{{ $key }}]]
{{- range $field, $inner := . }}
{{- if not (kindIs "invalid" $inner) }}
{{ include "towline.toml.key" $field }} = {{ include "towline.toml.value" $inner }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/*
Settings of a component as JSON: what the chart decides, then `settings`, then the component's own. Takes a map: root, shape (of the
pod), made (settings by the chart for this component), own.
*/}}
{{- define "towline.settings" -}}
{{- $values := .root.Values -}}
{{- $common := dict
  "repositories" $values.repositories
  "socket" "/run/towline/agent/agent.sock"
  "grace" (printf "%ds" (sub (int .shape.terminationGracePeriodSeconds) 10))
  "identity" "/etc/towline/identity"
  "listen" $values.listen
  "allow" $values.allow
  "peers" (dict "dns" (list (include "towline.agents" .root)))
-}}
{{- with $values.monitoring.scraper -}}
{{- $_ := set $common "scrapers" (list .) -}}
{{- end -}}
{{- mustMergeOverwrite $common (deepCopy .made) (deepCopy $values.settings) (deepCopy .own) | mustToJson -}}
{{- end -}}

{{/* Config map with the settings of a component. Takes a map: root, component, name, settings (JSON), files (more of them). */}}
{{- define "towline.config" -}}
apiVersion: v1
kind: ConfigMap
metadata:
  name: {{ .name }}
  labels:
    {{- include "towline.labels" (list .root .component) | nindent 4 }}
data:
  agent.toml: |
    {{- include "towline.toml" (mustFromJson .settings) | trim | nindent 4 }}
  {{- range $file, $text := .files }}
  {{- with $text }}
  {{ $file }}: |
    {{- . | trim | nindent 4 }}
  {{- end }}
  {{- end }}
{{- end -}}

{{/* Hash of the settings that take effect at a start; rules and the advisor's files are read again without one. */}}
{{- define "towline.restart" -}}
{{- omit (mustFromJson .) "allow" "callers" "scrapers" | mustToJson | sha256sum | trunc 16 -}}
{{- end -}}
