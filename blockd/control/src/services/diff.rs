//! The content of a volume, as a whole or since a snapshot, as a stream of ranges.

use blockd_api::v1;
use blockd_engine::pool::PoolHandle;
use blockd_mapper::engine::{DiffPart, DiffRequest, RangeState};
use blockd_media::error::Error;
use blockd_media::units::to_wire;
use tokio::sync::mpsc;

use super::Control;
use super::volumes::{existing, of};

/// Ranges of one message: some 100 KiB.
const RANGES_IN_MESSAGE: usize = 4096;
/// Messages that wait for the client of a stream.
const DEPTH: usize = 4;

type Message = Result<v1::DiffVolumeResponse, tonic::Status>;

impl Control {
    /// The ranges of a volume from a byte on, and what they hold beside another volume.
    pub(super) async fn diff_volume(
        &self,
        asked: &v1::DiffVolumeRequest,
    ) -> Result<mpsc::Receiver<Message>, Error> {
        let handle = self.pool(&asked.pool)?;
        let volume = existing(&handle, &asked.name)?;
        let base = match asked.since.as_str() {
            "" => None,
            since => Some(existing(&handle, since)?.id),
        };
        let from = u64::try_from(asked.from_bytes)
            .map_err(|_| Error::invalid("from_bytes", asked.from_bytes, "0 or more"))?;
        if from > volume.size {
            let allowed = format!("at most the volume's {} bytes", volume.size);
            return Err(Error::invalid("from_bytes", from, allowed));
        }
        let request = DiffRequest {
            volume: volume.id,
            base,
            from,
            to: u64::MAX,
            max_ranges: RANGES_IN_MESSAGE,
        };
        // Errors in the request are the call's own answer.
        let first = part(&handle, &request).await?;
        let (send, receive) = mpsc::channel(DEPTH);
        tokio::spawn(go_on(handle, request, first, send));
        Ok(receive)
    }
}

async fn part(pool: &PoolHandle, request: &DiffRequest) -> Result<DiffPart, Error> {
    pool.diff(*request).await.map_err(|error| of(pool, error))
}

/// Sends part after part, until the end or until the receiver is gone.
async fn go_on(
    pool: PoolHandle,
    mut request: DiffRequest,
    mut now: DiffPart,
    send: mpsc::Sender<Message>,
) {
    loop {
        let next = now.next;
        if send.send(Ok(message(&now))).await.is_err() {
            return;
        }
        let Some(next) = next else { return };
        request.from = next;
        now = match part(&pool, &request).await {
            Ok(part) => part,
            Err(error) => {
                let _ = send.send(Err(error.to_status())).await;
                return;
            }
        };
    }
}

fn message(part: &DiffPart) -> v1::DiffVolumeResponse {
    let range = |range: &blockd_mapper::engine::DiffRange| v1::VolumeRange {
        offset_bytes: to_wire(range.offset),
        length_bytes: to_wire(range.len),
        state: match range.state {
            RangeState::Same => v1::RangeState::Same,
            RangeState::Data => v1::RangeState::Data,
            RangeState::Zero => v1::RangeState::Zero,
        }
        .into(),
    };
    v1::DiffVolumeResponse {
        ranges: part.ranges.iter().map(range).collect(),
        volume_bytes: to_wire(part.size),
        next_bytes: to_wire(part.next.unwrap_or(part.size)),
    }
}
