#!/bin/sh
# Makes a certificate for the scheduler's extender in the current folder: ca.crt, the authority that
# the scheduler checks it by, and tls.crt with tls.key, for the extender's secret. In place of these
# commands, cert-manager or an authority of your own does as well.
#
#   certificate.sh [SERVICE [NAMESPACE]]
set -eu
service=${1:-blockd-csi-extender}
namespace=${2:-blockd}
# As the scheduler calls it: see scheduler.yaml.
name=$service.$namespace.svc
new_key="-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes"

umask 077
# The options are several words.
# shellcheck disable=SC2086
openssl req -x509 $new_key -days 3650 -subj "/CN=$service authority" -keyout ca.key -out ca.crt
# shellcheck disable=SC2086
openssl req $new_key -subj "/CN=$service" -keyout tls.key -out tls.csr
printf 'subjectAltName=DNS:%s\n' "$name" > tls.ext
openssl x509 -req -in tls.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 825 \
    -extfile tls.ext -out tls.crt
rm tls.csr tls.ext
chmod 644 ca.crt tls.crt
echo "ca.crt, tls.crt and tls.key are for $name; keep ca.key elsewhere"
