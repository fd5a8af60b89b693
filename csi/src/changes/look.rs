//! Requests of the snapshot metadata service: checks them, finds their snapshots, streams the
//! ranges.

use std::collections::HashMap;
use std::sync::Arc;

use blockd_api::v1;

use crate::controller::find_snapshot;
use crate::error::Error;
use crate::ids::SnapshotId;
use crate::limits;
use crate::plugin::{Plugin, Sink};
use crate::proto::BlockMetadata;

use super::ranges::{MAX_RESULTS, Ranges, Wanted};

/// A field of a request, and the id in it.
type Field = (&'static str, String);

/// A request of either kind.
pub(super) struct Asked {
    /// The base snapshot of the comparison; `None` for the allocated ranges of the target.
    pub(super) base: Option<Field>,
    pub(super) target: Field,
    pub(super) from: i64,
    pub(super) max_results: i32,
    pub(super) secrets: HashMap<String, String>,
}

/// A snapshot, and its description by the daemon.
type Found = (SnapshotId, v1::Volume);

impl Asked {
    /// Checks the request without a call of the daemon. Returns how many ranges a message may have.
    fn check(&self) -> Result<usize, Error> {
        for (field, id) in self.base.iter().chain([&self.target]) {
            limits::required(field, id)?;
        }
        limits::map("secrets", &self.secrets)?;
        let max = match usize::try_from(self.max_results) {
            Ok(0) => MAX_RESULTS,
            Ok(max) => max.min(MAX_RESULTS),
            Err(_) => return Err(Error::invalid("max_results", self.max_results, "0 or more")),
        };
        if self.from < 0 {
            return Err(Error::out_of_range("starting_offset", self.from, "0 or more"));
        }
        Ok(max)
    }

    /// The snapshots as they are now, the base first.
    async fn find(&self, plugin: &Plugin) -> Result<(Option<Found>, Found), Error> {
        let base = match &self.base {
            Some(base) => Some(found(plugin, base).await?),
            None => None,
        };
        Ok((base, found(plugin, &self.target).await?))
    }
}

async fn found(plugin: &Plugin, (_, id): &Field) -> Result<Found, Error> {
    find_snapshot(plugin, id).await?.ok_or_else(|| Error::not_found("snapshot", id))
}

/// Refuses two snapshots that are not of one volume, or in the wrong order. Numbers are given in
/// order and not again: of two volumes of one name, the second has another.
fn check_pair((base_id, base): &Found, (target_id, target): &Found) -> Result<(), Error> {
    let is_one = base_id.pool == target_id.pool
        && base_id.source() == target_id.source()
        && base.origin_id == target.origin_id;
    if !is_one {
        let allowed = format!("of the volume that {target_id} is of");
        return Err(Error::invalid("base_snapshot_id", base_id, allowed));
    }
    if base.id > target.id {
        let allowed = format!("older than {target_id}");
        return Err(Error::invalid("base_snapshot_id", base_id, allowed));
    }
    Ok(())
}

/// A message of the daemon's, with offsets from the end of the header.
fn behind(header: i64, mut part: v1::DiffVolumeResponse) -> v1::DiffVolumeResponse {
    let offsets = part.ranges.iter_mut().map(|range| &mut range.offset_bytes);
    for bytes in offsets.chain([&mut part.volume_bytes, &mut part.next_bytes]) {
        *bytes = bytes.saturating_sub(header);
    }
    part
}

/// Streams the requested ranges, message by message.
pub(super) async fn send<T>(
    plugin: Arc<Plugin>,
    asked: Asked,
    sink: Sink<T>,
    message: fn(i64, Vec<BlockMetadata>) -> T,
) -> Result<(), Error> {
    let max = asked.check()?;
    let (base, (id, target)) = asked.find(&plugin).await?;
    let target = (id, target);
    if let Some(base) = &base {
        check_pair(base, &target)?;
    }
    // Offsets are those that a workload sees, behind the header of an encrypted volume.
    let header = plugin.header(&target.1).get();
    let size = target.1.size_bytes - header;
    if asked.from > size {
        let allowed = format!("at most the {size} bytes of {}", target.0);
        return Err(Error::out_of_range("starting_offset", asked.from, allowed));
    }
    let request = v1::DiffVolumeRequest {
        name: target.0.name.clone(),
        pool: target.0.pool.clone(),
        since: base.as_ref().map(|(id, _)| id.name.clone()).unwrap_or_default(),
        from_bytes: asked.from + header,
    };
    let mut differences = plugin.daemon.diff_volume(request).await?;
    // The daemon took names for numbers when it began. If the names stand for the same ones before
    // and after that, it took the right ones: numbers are not given again.
    let (base_now, target_now) = asked.find(&plugin).await?;
    let number = |found: &Found| found.1.id;
    if base_now.as_ref().map(number) != base.as_ref().map(number)
        || number(&target_now) != number(&target)
    {
        return Err(Error::not_found("snapshot", format!("{}, as it was,", target.0)));
    }
    let wanted = if base.is_some() { Wanted::Changed } else { Wanted::Data };
    let mut ranges = Ranges::new(wanted, max, asked.from, size);
    while let Some(part) = differences.next().await? {
        ranges.take(&behind(header, part))?;
        while let Some(full) = ranges.full() {
            sink.send(message(size, full)).await?;
        }
    }
    for left in ranges.end()? {
        sink.send(message(size, left)).await?;
    }
    Ok(())
}
