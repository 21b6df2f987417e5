#!/bin/sh
# Alert command for ciuic: logs the alert, mails it to the address in its first argument, and posts it to CIUIC_WEBHOOK if set.
#
#   [alert]
#   command = ["/etc/ciuic/alert.sh", "ops@example.org"]
#   user = "nobody"
#
# Events: alert_raised, alert_cleared, trainer_died, trainer_failed, trainer_hung, trainer_lost, trainer_recovered.
# Standard input is the whole document (docs/daemon.md, The alert command). The command is killed after alert.timeout.
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
