{{/* Refuses values that contradict each other; values.schema.json checks each by itself. */}}
{{- define "towline.checks" -}}
{{- $certificates := .Values.certificates -}}
{{- if and $certificates.secrets $certificates.issuer.name -}}
{{- fail "certificates: issuer.name and secrets are both set; set one of them" -}}
{{- end -}}
{{- if not (or $certificates.secrets $certificates.issuer.name) -}}
{{- fail "certificates: set issuer.name for cert-manager with its csi-driver, or secrets=true for certificates of `towline identity issue`" -}}
{{- end -}}
{{- if and $certificates.secrets .Values.nodes.enabled (not .Values.nodes.hostIdentity) -}}
{{- fail "nodes.hostIdentity: required with certificates.secrets, because each node has a certificate of its own" -}}
{{- end -}}
{{- $names := list -}}
{{- range .Values.gateways -}}
{{- if has .name $names -}}
{{- fail (printf "gateways: two are called %s" .name) -}}
{{- end -}}
{{- $names = append $names .name -}}
{{- if and $certificates.secrets (not .identitySecret) -}}
{{- fail (printf "gateways: %s has no identitySecret, which certificates.secrets requires" .name) -}}
{{- end -}}
{{- end -}}
{{- if .Values.advisor.enabled -}}
{{- if not .Values.advisor.sites -}}
{{- fail "advisor.sites: the text of the sites file is required, such as --set-file advisor.sites=sites.toml" -}}
{{- end -}}
{{- if and $certificates.secrets (not .Values.advisor.identitySecret) -}}
{{- fail "advisor.identitySecret: required with certificates.secrets" -}}
{{- end -}}
{{- end -}}
{{- if .Values.monitoring.serviceMonitor.enabled -}}
{{- if not .Values.monitoring.scraper -}}
{{- fail "monitoring.scraper: required by serviceMonitor: the name in the certificate of Prometheus" -}}
{{- end -}}
{{- if and $certificates.secrets (not .Values.monitoring.scraperSecret) -}}
{{- fail "monitoring.scraperSecret: required by serviceMonitor with certificates.secrets" -}}
{{- end -}}
{{- end -}}
{{- end -}}
