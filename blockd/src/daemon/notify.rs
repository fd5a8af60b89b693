//! What the service manager is told.

use std::time::Duration;

use sd_notify::NotifyState;

use crate::control::Control;

/// Says something to the service manager, if there is one.
pub(super) fn tell(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::warn!(%error, "the service manager can't be told");
    }
}

/// Tells a watchdog that asks for it that the daemon lives: tasks run, and pool threads answer.
pub(super) async fn watchdog(control: Control) {
    let Some(limit) = sd_notify::watchdog_enabled() else { return };
    let pause = limit / 3;
    loop {
        if pools_answer(&control, pause).await {
            tell(&[NotifyState::Watchdog]);
        } else {
            tracing::error!("a pool's thread does not answer");
        }
        tokio::time::sleep(pause).await;
    }
}

async fn pools_answer(control: &Control, limit: Duration) -> bool {
    for known in control.known_pools() {
        let failed = known.failure().is_some();
        let Ok(handle) = known.state else { continue };
        if !failed && tokio::time::timeout(limit, handle.space()).await.is_err() {
            return false;
        }
    }
    true
}
