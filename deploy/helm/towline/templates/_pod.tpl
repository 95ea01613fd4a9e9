{{/*
Template of a component's pods. Takes a map: root, component, shape (resources, nodeSelector, ...), agent (name of the agent at the
site), config (name of its config map), settings (JSON), cache (volume source; none if a claim template makes it), and with own
certificates identitySecret or hostIdentity. `api` gives the pod a token for the API of Kubernetes; `ports` and `secrets` (volumes, mounted at
/etc/towline/NAME) are further ones.
*/}}
{{- define "towline.pod" -}}
{{- $root := .root -}}
{{- $values := $root.Values -}}
metadata:
  labels:
    {{- /* No version: it would replace the pods, and with them their caches, for nothing. */}}
    {{- include "towline.selector" (list $root .component) | nindent 4 }}
    {{- with .podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    checksum/settings: {{ include "towline.restart" .settings | quote }}
    {{- with $values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ include "towline.fullname" $root }}-{{ .component }}
  automountServiceAccountToken: {{ default false .api }}
  {{- with $values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . | quote }}
    {{- end }}
  {{- end }}
  {{- with .shape.priorityClassName }}
  priorityClassName: {{ . | quote }}
  {{- end }}
  {{- with .shape.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .shape.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .shape.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .shape.topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  terminationGracePeriodSeconds: {{ .shape.terminationGracePeriodSeconds }}
  securityContext:
    runAsUser: 65532
    runAsGroup: 65532
    fsGroup: 65532
    fsGroupChangePolicy: OnRootMismatch
    runAsNonRoot: true
    seccompProfile: { type: RuntimeDefault }
  containers:
    - name: agent
      image: {{ include "towline.image" $root | quote }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      args: [agent, --config, /etc/towline/settings/agent.toml]
      env:
        - { name: TOWLINE_AGENT, value: /run/towline/agent/agent.sock }
        - { name: STATE_DIRECTORY, value: /var/lib/towline/state }
        - { name: XDG_CACHE_HOME, value: /var/lib/towline/index }
        - { name: RUST_LOG, value: {{ $values.logLevel | quote }} }
        {{- with $values.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- with $values.credentials.secret }}
      envFrom:
        - secretRef: { name: {{ . | quote }} }
      {{- end }}
      ports:
        - { name: towline, containerPort: 7171, protocol: TCP }
        - { name: towline-quic, containerPort: 7171, protocol: UDP }
        {{- with .ports }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      readinessProbe:
        exec: { command: [towline, top, --ready] }
        periodSeconds: 10
        timeoutSeconds: 10
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities: { drop: [ALL] }
      resources:
        {{- toYaml .shape.resources | nindent 8 }}
      volumeMounts:
        - { name: run, mountPath: /run/towline }
        - { name: cache, mountPath: /var/lib/towline }
        - { name: settings, mountPath: /etc/towline/settings, readOnly: true }
        - { name: identity, mountPath: /etc/towline/identity, readOnly: true }
        {{- range .secrets }}
        - { name: {{ .name }}, mountPath: /etc/towline/{{ .name }}, readOnly: true }
        {{- end }}
  volumes:
    - { name: run, emptyDir: { sizeLimit: 16Mi } }
    {{- with .cache }}
    - name: cache
      {{- toYaml . | nindent 6 }}
    {{- end }}
    - { name: settings, configMap: { name: {{ .config }} } }
    - name: identity
      {{- include "towline.identity" . | nindent 6 }}
    {{- with .secrets }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* Volume source with the certificate of an agent. */}}
{{- define "towline.identity" -}}
{{- $certificates := .root.Values.certificates -}}
{{- if not $certificates.secrets -}}
csi:
  driver: csi.cert-manager.io
  readOnly: true
  volumeAttributes:
    csi.cert-manager.io/issuer-name: {{ $certificates.issuer.name | quote }}
    csi.cert-manager.io/issuer-kind: {{ $certificates.issuer.kind | quote }}
    csi.cert-manager.io/issuer-group: {{ $certificates.issuer.group | quote }}
    csi.cert-manager.io/uri-sans: {{ printf "towline://%s/%s" .root.Values.site .agent | quote }}
    csi.cert-manager.io/dns-names: towline
    csi.cert-manager.io/key-usages: digital signature,client auth,server auth
    csi.cert-manager.io/key-algorithm: ECDSA
    csi.cert-manager.io/key-size: "256"
    csi.cert-manager.io/key-encoding: PKCS8
    csi.cert-manager.io/duration: {{ $certificates.duration | quote }}
    csi.cert-manager.io/certificate-file: tls.crt
    csi.cert-manager.io/privatekey-file: tls.key
    csi.cert-manager.io/ca-file: ca.crt
    csi.cert-manager.io/fs-group: "65532"
{{- else if .hostIdentity -}}
hostPath: { path: {{ .hostIdentity | quote }}, type: Directory }
{{- else -}}
secret: { secretName: {{ .identitySecret | quote }}, defaultMode: 0440 }
{{- end -}}
{{- end -}}
