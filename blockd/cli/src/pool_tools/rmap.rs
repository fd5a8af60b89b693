//! `blockd pool rmap`.

use std::path::PathBuf;

use blockd_inspect::rmap::{Claim, Use, rmap};
use blockd_mapper::format::catalogue::VolumeKind;
use blockd_media::error::Error;
use blockd_media::pool::Access;
use blockd_media::units::parse_size;
use serde::Serialize;

use super::{Devices, LostShape, lost_text, reader};
use crate::Context;

/// Show who owns a range of a pool's file or disk
///
/// For a range that the kernel or a disk reports as bad: prints the volumes and snapshots with data
/// in it, and at which of their offsets, or the metadata in it. The rest of the range is free,
/// unless a part of the metadata can't be read, which is exit code 10, or the pool was not closed
/// in order: the delta ring is not read.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd pool rmap --offset 1G --length 4K /dev/sdb")]
pub(crate) struct Rmap {
    #[command(flatten)]
    devices: Devices,

    /// The first byte of the range
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true)]
    offset: String,

    /// How long the range is [default: 1]
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true)]
    length: Option<String>,

    /// Which of the paths the range is on [default: the first]
    #[arg(long, value_name = "PATH")]
    on: Option<PathBuf>,
}

/// The output of `pool rmap --json`.
#[derive(Debug, Serialize)]
struct Owned {
    path: String,
    clean: bool,
    claims: Vec<ClaimShape>,
    lost: Vec<LostShape>,
}

#[derive(Debug, Serialize)]
struct ClaimShape {
    first_byte: u64,
    end_byte: u64,
    kind: &'static str,
    volume: Option<String>,
    volume_id: Option<u32>,
    volume_byte: Option<u64>,
    text: String,
}

impl Rmap {
    pub(crate) fn run(&self, context: &Context) -> Result<(), Error> {
        let offset = parse_size("offset", &self.offset)?;
        let length = self.length.as_deref().map_or(Ok(1), |text| parse_size("length", text))?;
        let on = self.on.as_ref().unwrap_or(&self.devices.paths[0]);
        let handle = self.devices.paths.iter().position(|path| path == on);
        let handle =
            handle.ok_or_else(|| Error::invalid("on", on.display(), "one of the paths given"))?;
        let mut devices = self.devices.open(Access::Read)?;
        let size = devices.present()[handle].size;
        let end = offset.saturating_add(length);
        if length == 0 || end > size {
            let value = format!("{offset} and {length} bytes");
            let allowed = format!("within the {size} bytes of {}", on.display());
            return Err(Error::invalid("range", value, allowed));
        }
        let mut reader = reader(&mut devices)?;
        let table = 0..reader.superblock().devices.as_slice().len();
        let mut table = table.filter(|&at| usize::from(reader.handle(at).0) == handle);
        let Some(device) = table.next() else {
            let allowed = "a device that has not left its pool";
            return Err(Error::invalid("path", on.display(), allowed));
        };
        let report = rmap(&mut reader, device, &(offset..end))?;
        let owned = Owned {
            path: on.display().to_string(),
            clean: reader.superblock().clean,
            claims: report.claims.iter().map(shape).collect(),
            lost: report.lost.iter().map(LostShape::from).collect(),
        };
        context.output.either(&owned, || text(&owned))?;
        for lost in &report.lost {
            eprintln!("{}", lost_text("lost", lost));
        }
        if report.lost.is_empty() {
            return Ok(());
        }
        let count = report.lost.len();
        let problem =
            format!("{count} part(s) of the metadata can't be read: owners may be missing");
        Err(Error::Corrupt { what: "pool".to_owned(), problem })
    }
}

fn shape(claim: &Claim) -> ClaimShape {
    let (kind, volume, text) = match &claim.usage {
        Use::Superblock => ("superblock", None, "superblocks".to_owned()),
        Use::Log => ("log", None, "the log".to_owned()),
        Use::Reserve => ("reserve", None, "kept for metadata".to_owned()),
        Use::Page { structure, tree, level, index } => {
            let of = if *tree == 0 { "the catalogue".to_owned() } else { format!("volume {tree}") };
            ("page", None, format!("{structure} {index} of level {level} of {of}"))
        }
        Use::Data { volume, name, kind, offset } => {
            let word = if *kind == VolumeKind::Snapshot { "snapshot" } else { "volume" };
            let shown = blockd_media::error::shown(name);
            let text = format!("{word} {shown} from its byte {offset} on");
            ("data", Some((name.clone(), volume.0, *offset)), text)
        }
    };
    ClaimShape {
        first_byte: claim.range.start,
        end_byte: claim.range.end,
        kind,
        volume: volume.as_ref().map(|volume| volume.0.clone()),
        volume_id: volume.as_ref().map(|volume| volume.1),
        volume_byte: volume.as_ref().map(|volume| volume.2),
        text,
    }
}

fn text(owned: &Owned) -> String {
    if owned.claims.is_empty() {
        let text = match (owned.lost.is_empty(), owned.clean) {
            (false, _) => "no known owner: a part of the metadata can't be read\n",
            (true, false) => {
                "no known owner: the pool was not closed in order, and its delta ring is not read\n"
            }
            (true, true) => "free\n",
        };
        return text.to_owned();
    }
    let line = |claim: &ClaimShape| {
        let last = claim.end_byte - 1;
        format!("bytes {} to {last}: {}\n", claim.first_byte, claim.text)
    };
    owned.claims.iter().map(line).collect()
}
