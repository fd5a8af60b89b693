//! Brings a volume's cell to this node, or attaches the volume while its cell is on another one.

use blockd_api::v1::{self, CellState, ErrorKind, FrontEnd};

use super::{CellId, find};
use crate::daemon::Daemon;
use crate::error::Error;

/// How a volume is to be used that is brought.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Aim {
    /// This node alone uses it: the cell comes here, unless another node uses it.
    Alone,
    /// The same, but where another node uses the volume it is attached on standby, and its first
    /// request fetches the cell.
    Shared(FrontEnd),
}

/// Brings a volume here, as far as `aim` needs it. One that is here is left as it is. `node` is the
/// name of this node.
///
/// # Errors
/// NOT_FOUND: there is no such cell. FAILED_PRECONDITION: another node uses the volume, or its
/// daemon does not answer.
pub(crate) async fn bring(daemon: &Daemon, node: &str, id: &CellId, aim: Aim) -> Result<(), Error> {
    // Without a look at the group, which may hang: a volume that is here needs none.
    match daemon.find_volume(&id.cell, &id.volume).await {
        Ok(Some(volume)) if !volume.standby || aim != Aim::Alone => return Ok(()),
        // The pool may be closed: taking the cell opens it.
        Ok(_) | Err(Error::Daemon(_)) => {}
        Err(error) => return Err(error),
    }
    let cell = find(daemon, node, id).await?;
    let cell = cell.ok_or_else(|| Error::not_found("volume", id))?;
    match (aim, open(daemon, id, &cell).await) {
        (Aim::Shared(front_end), Err(error)) if is_refused_elsewhere(&error) => {
            let asked = v1::StandByRequest {
                group: id.group.clone(),
                cell: id.cell.clone(),
                volume: id.volume.clone(),
                read_only: false,
                front_end: front_end.into(),
            };
            let stood = daemon.stand_by(asked).await;
            stood.map(drop).map_err(|error| with_advice(id, &cell, error))
        }
        (_, opened) => opened,
    }
}

/// Opens a cell that is there on this node. Another node's is asked for, and never taken from a
/// node that uses it. One that an interrupted call has begun is made to its end.
///
/// # Errors
/// As [`bring`].
pub(crate) async fn open(daemon: &Daemon, id: &CellId, cell: &v1::Cell) -> Result<(), Error> {
    if cell.state() == CellState::Open {
        return Ok(());
    }
    let asked = v1::TakeCellRequest {
        group: id.group.clone(),
        name: id.cell.clone(),
        handover: true,
        only_unused: true,
        ..Default::default()
    };
    let error = match daemon.take_cell(asked).await {
        Ok(_) => return Ok(()),
        Err(error) => error,
    };
    // One that is gone meanwhile was deleted by another node, and is never made again.
    let is_refused = error.daemon_kind() == Some(ErrorKind::InUse);
    if is_refused && matches!(cell.state(), CellState::Free | CellState::Held) {
        let asked = v1::CreateCellRequest {
            group: id.group.clone(),
            name: id.cell.clone(),
            device_bytes: cell.device_bytes,
            extent_size: 0,
            only_begun: true,
        };
        if daemon.create_cell(asked).await.is_ok() {
            return Ok(());
        }
    }
    Err(with_advice(id, cell, error))
}

/// Whether an error says that the host which has a cell keeps it.
fn is_refused_elsewhere(error: &Error) -> bool {
    let Error::Daemon(detail) = error else { return false };
    detail.kind() == ErrorKind::InUse && detail.message.contains(" refuses: ")
}

/// Whether an error says that the host which has a cell uses a volume of it.
#[must_use]
pub(crate) fn is_used_elsewhere(error: &Error) -> bool {
    is_refused_elsewhere(error) && error.to_string().contains(" is in use")
}

/// The error of a volume whose cell is not open here.
#[must_use]
pub(crate) fn unopened(id: &CellId, cell: &v1::Cell) -> Error {
    let problem = match cell.state() {
        CellState::Elsewhere => format!("is on host {} of volume group {}", cell.holder, id.group),
        CellState::Free => "is open on no host".to_owned(),
        _ => format!("is not open, and its lease in volume group {} can't be read", id.group),
    };
    Error::in_use(format_args!("volume {id}"), problem)
}

/// Adds to an error what helps where the host that has the cell is dead. A host that refuses is
/// not.
fn with_advice(id: &CellId, cell: &v1::Cell, error: Error) -> Error {
    let text = error.to_string();
    let is_silent =
        text.starts_with(&format!("host {} ", cell.holder)) && !text.contains("refuses");
    if !matches!(error, Error::Daemon(_)) || cell.state() != CellState::Elsewhere || !is_silent {
        return error;
    }
    let (group, host) = (&id.group, cell.holder);
    let problem = format!(
        "is on another host: {text}; if host {host} is dead, give its node the taint \
         node.kubernetes.io/out-of-service=nodeshutdown:NoExecute, then run \
         `blockd node declare-dead {group}/{host}` on a host that is not"
    );
    Error::in_use(format_args!("volume {id}"), problem)
}

#[cfg(test)]
mod tests {
    use blockd_api::v1::ErrorDetail;

    use super::*;
    use crate::cells::Cells;

    #[test]
    fn advice_is_for_hosts_that_do_not_answer() {
        let id = Cells::new("d", "").id("san", "a");
        let cell = |state: CellState| v1::Cell {
            name: id.cell.clone(),
            state: state.into(),
            holder: 2,
            ..Default::default()
        };
        let error = |message: &str| {
            let (kind, message) = (ErrorKind::InUse.into(), message.to_owned());
            Error::Daemon(Box::new(ErrorDetail { kind, message, ..Default::default() }))
        };
        let silent = "host 2 of volume group san does not answer at 10.0.0.2:7011: timeout";
        let advised = with_advice(&id, &cell(CellState::Elsewhere), error(silent));
        assert_eq!(advised.code(), tonic::Code::FailedPrecondition);
        for part in ["blockd node declare-dead san/2", "out-of-service", silent, &id.to_string()] {
            assert!(advised.to_string().contains(part), "{advised}");
        }
        let refuses = "host 2 refuses: cell csi-1 is in use: its volume csi.1 is attached";
        assert!(is_used_elsewhere(&error(refuses)));
        for other in [silent, "host 2 refuses: cell csi-1 is on a daemon that ends"] {
            assert!(!is_used_elsewhere(&error(other)), "{other}");
        }
        for (state, text) in [
            (CellState::Elsewhere, refuses),
            (CellState::Elsewhere, "this host was fenced"),
            (CellState::Free, silent),
        ] {
            assert_eq!(with_advice(&id, &cell(state), error(text)).to_string(), text);
        }
    }
}
