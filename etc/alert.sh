#!/bin/sh
# An alert command for ciuic: mail to the address that it is called with, a web hook if CIUIC_WEBHOOK is set below, and the log.
#
#   [alert]
#   command = ["/etc/ciuic/alert.sh", "ops@example.org"]
#   user = "nobody"
#
# Events: alert_raised, alert_cleared, trainer_died, trainer_failed, trainer_hung, trainer_lost, trainer_recovered.
# The whole document comes on the standard input (docs/daemon.md, Alerts). Ends on its own within alert.timeout, or is killed.
set -u
CIUIC_WEBHOOK=${CIUIC_WEBHOOK:-}
document=$(cat)

logger -t ciuic-alert -p user.err -- "$CIUIC_EVENT: $CIUIC_MESSAGE" 2>/dev/null

if [ -n "${1:-}" ] && command -v sendmail >/dev/null; then
    sendmail -t <<MAIL
To: $1
Subject: [$CIUIC_HOST] $CIUIC_EVENT ${CIUIC_TRAINER}

$CIUIC_MESSAGE

emergency snapshot: ${CIUIC_SNAPSHOT:-none}
$document
MAIL
fi

if [ -n "$CIUIC_WEBHOOK" ]; then
    printf '%s' "$document" | curl --fail --silent --show-error --max-time 20 -H 'Content-Type: application/json' --data-binary @- "$CIUIC_WEBHOOK"
fi
