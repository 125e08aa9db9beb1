{{- define "ecoserve.name" -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "ecoserve.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (include "ecoserve.name" .) -}}
{{- end -}}

{{- define "ecoserve.authority" -}}
{{- .Values.mtls.authority | default (printf "%s-ca" (include "ecoserve.name" .)) -}}
{{- end -}}

{{- define "ecoserve.selector" -}}
app.kubernetes.io/name: ecoserve
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end -}}

{{- define "ecoserve.labels" -}}
{{ include "ecoserve.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{/* Pod and container under Pod Security "restricted". */}}
{{- define "ecoserve.podSecurity" -}}
runAsNonRoot: true
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "ecoserve.containerSecurity" -}}
allowPrivilegeEscalation: false
capabilities: {drop: [ALL]}
readOnlyRootFilesystem: true
{{- end -}}

{{/* What the controller does in the namespaces that it works in: no more, no less. */}}
{{- define "ecoserve.rules" -}}
- apiGroups: [ecoserve.io]
  resources: [ecoserveclusters]
  verbs: [get, list, watch, patch]
- apiGroups: [ecoserve.io]
  resources: [ecoserveclusters/status, macroinstances/status]
  verbs: [patch]
- apiGroups: [ecoserve.io]
  resources: [macroinstances]
  verbs: [list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [pods/status]
  verbs: [patch]
- apiGroups: [""]
  resources: [events]
  verbs: [create, patch]
- apiGroups: [""]
  resources: [serviceaccounts, configmaps, services]
  verbs: [get, list, watch, create, patch, delete]
# Certificates of gateways and workers, and those that specs name.
- apiGroups: [""]
  resources: [secrets]
  verbs: [get, list, watch, create, patch]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
{{- if .Values.inferencePools.enabled }}
- apiGroups: [inference.networking.k8s.io]
  resources: [inferencepools]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices]
  verbs: [get, list, watch, create, patch, delete]
{{- end }}
{{- if .Values.monitoring.enabled }}
- apiGroups: [monitoring.coreos.com]
  resources: [podmonitors, prometheusrules]
  verbs: [get, list, watch, create, patch, delete]
{{- end }}
{{- end -}}
