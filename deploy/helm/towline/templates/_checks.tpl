{{/* Refuses values that contradict each other; values.schema.json checks each by itself. */}}
{{- define "towline.checks" -}}
{{- $fullname := include "towline.fullname" . -}}
{{- if not (regexMatch "^[a-z]([a-z0-9-]{0,27}[a-z0-9])?$" $fullname) -}}
{{- fail (printf "%q cannot be the name of a Service: set fullnameOverride to at most 29 lower-case letters, digits and -, a letter first" $fullname) -}}
{{- end -}}
{{- include "towline.checks.folders" . -}}
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
{{- $service := default dict .service -}}
{{- if and $service.loadBalancerClass (ne (default "LoadBalancer" $service.type) "LoadBalancer") -}}
{{- fail (printf "gateways: %s has a loadBalancerClass, which only services of type LoadBalancer may have" .name) -}}
{{- end -}}
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
{{- include "towline.checks.webhook" . -}}
{{- include "towline.checks.kueue" . -}}
{{- include "towline.checks.gates" . -}}
{{- if .Values.monitoring.serviceMonitor.enabled -}}
{{- if not .Values.monitoring.scraper -}}
{{- fail "monitoring.scraper: required by serviceMonitor: the name in the certificate of Prometheus" -}}
{{- end -}}
{{- if and $certificates.secrets (not .Values.monitoring.scraperSecret) -}}
{{- fail "monitoring.scraperSecret: required by serviceMonitor with certificates.secrets" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "towline.checks.webhook" -}}
{{- $webhook := .Values.webhook -}}
{{- if $webhook.enabled -}}
{{- if not $webhook.allow -}}
{{- fail "webhook.allow: required: the names that pods may restore and save, by namespace and service account" -}}
{{- end -}}
{{- if not $webhook.authoritySecret -}}
{{- fail "webhook.authoritySecret: required: the authority that signs certificates of service accounts, as tls.crt and tls.key" -}}
{{- end -}}
{{- if .Values.certificates.secrets -}}
{{- range $key := list "identitySecret" "certificateSecret" "caBundle" -}}
{{- if not (get $webhook $key) -}}
{{- fail (printf "webhook.%s: required with certificates.secrets" $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "towline.checks.kueue" -}}
{{- $kueue := .Values.kueue -}}
{{- if $kueue.enabled -}}
{{- if not .Values.advisor.enabled -}}
{{- fail "kueue: requires advisor.enabled: the advisor decides the checks" -}}
{{- end -}}
{{- if not (or $kueue.allow .Values.webhook.allow) -}}
{{- fail "kueue.allow: required: the names that workloads may wait for, by namespace and service account" -}}
{{- end -}}
{{- if not (or $kueue.holders .Values.gateways) -}}
{{- fail "kueue.holders: required without gateways: the agents that fetch and hold what workloads wait for" -}}
{{- end -}}
{{- if and .Values.certificates.secrets (not .Values.advisor.agent) -}}
{{- fail "advisor.agent: required with certificates.secrets and kueue: the name in the certificate of the advisor" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "towline.checks.gates" -}}
{{- $gates := .Values.gates -}}
{{- if $gates.enabled -}}
{{- if not (and .Values.advisor.enabled .Values.webhook.enabled) -}}
{{- fail "gates: requires advisor.enabled and webhook.enabled: the webhook gives pods a gate, and the advisor opens it" -}}
{{- end -}}
{{- if semverCompare "<1.30-0" .Capabilities.KubeVersion.Version -}}
{{- fail "gates: requires Kubernetes 1.30: older ones cannot limit the advisor to changing nothing of a pod but its gate" -}}
{{- end -}}
{{- if not (or $gates.holders .Values.gateways) -}}
{{- fail "gates.holders: required without gateways: the agents that fetch and hold what pods wait for" -}}
{{- end -}}
{{- if and .Values.certificates.secrets (not .Values.advisor.agent) -}}
{{- fail "advisor.agent: required with certificates.secrets and gates: the name in the certificate of the advisor" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Refuses folders that must outlive their pod on volumes that do not, and an audit log of an agent whose name changes with its pod. */}}
{{- define "towline.checks.folders" -}}
{{- $common := .Values.settings -}}
{{- if or $common.audit $common.handoff -}}
{{- fail "settings: audit and handoff are of one agent; set them for a gateway" -}}
{{- end -}}
{{- if or .Values.nodes.settings.audit .Values.advisor.settings.audit .Values.webhook.settings.audit -}}
{{- fail "audit: only for gateways, because the names of other agents change with their pods, and an audit log is of one agent" -}}
{{- end -}}
{{- if and .Values.nodes.settings.handoff (not .Values.nodes.cache.hostPath) -}}
{{- fail "nodes.settings.handoff: requires nodes.cache.hostPath, because checkpoints on any other volume are lost with the pod" -}}
{{- end -}}
{{- range .Values.gateways -}}
{{- $own := default dict .settings -}}
{{- if and (or $own.handoff $own.audit) (not .cache.claim) -}}
{{- fail (printf "gateways: %s has handoff or audit and no cache.claim: they are lost with the pod" .name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
