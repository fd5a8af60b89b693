{{- define "blockd.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if eq .Release.Name "blockd" -}}
blockd-csi
{{- else -}}
{{- printf "%s-blockd-csi" .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "blockd.daemonname" -}}
{{- if eq (include "blockd.fullname" .) "blockd-csi" -}}
blockd
{{- else -}}
{{- include "blockd.fullname" . -}}-daemon
{{- end -}}
{{- end -}}

{{- define "blockd.meta" -}}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "blockd.labels" -}}
app.kubernetes.io/name: {{ include "blockd.fullname" . }}
{{ include "blockd.meta" . }}
{{- end -}}

{{- define "blockd.image" -}}
{{- printf "%s:%s" .image.repository (.image.tag | default .version) -}}
{{- end -}}

{{- define "blockd.kubelet" -}}
{{- $known := dict "default" "/var/lib/kubelet" "k3s" "/var/lib/kubelet" "rke2" "/var/lib/kubelet" "k0s" "/var/lib/k0s/kubelet" "microk8s" "/var/snap/microk8s/common/var/lib/kubelet" "rancheros" "/opt/rke/var/lib/kubelet" -}}
{{- .Values.kubelet.dir | default (get $known .Values.kubelet.variant) -}}
{{- end -}}

{{- define "blockd.monitors" -}}
{{- if and .Values.healthMonitor.enabled .Values.health.enabled -}}yes{{- end -}}
{{- end -}}

{{- define "blockd.podenv" -}}
- name: NODE_NAME
  valueFrom:
    fieldRef:
      fieldPath: spec.nodeName
- name: NAMESPACE
  valueFrom:
    fieldRef:
      fieldPath: metadata.namespace
- name: POD_NAME
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
{{- end -}}

{{- /* Of sidecars: with the group of the plugin's endpoint. */ -}}
{{- define "blockd.sidecar" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}
