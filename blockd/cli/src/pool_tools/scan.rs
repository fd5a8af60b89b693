//! `blockd pool scan`.

mod paths;

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

use blockd_inspect::{Media, newest_copy};
use blockd_mapper::format::claim::{CLAIM_OFFSET, ClaimPage, ClaimState};
use blockd_mapper::format::superblock::{
    CLAIM_PAGE, COMPOSITE, DEVICE_STATES, PLACEMENT, Superblock, VOLUME_SETTINGS,
};
use blockd_mapper::geometry::PAGE_SIZE;
use blockd_mapper::units::DeviceIndex;
use blockd_media::error::Error;
use blockd_media::pool::{Access, Offline, PoolError, holds_pool, kind_of};
use blockd_media::{DeviceSpec, lock_owner};
use serde::Serialize;

use super::{failed, hex};
use crate::Context;
use crate::output::table::properties;

/// How long a claim is watched: an owner renews it twice a second.
const WATCH: Duration = Duration::from_millis(1500);

/// Find pools on files and disks
///
/// Reads superblocks and takes no lock: a daemon may serve the pools meanwhile, and none is needed.
/// Of a directory all files and disks in it are read, not those in directories below. A pool is
/// complete when all of its devices are among the paths.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd pool scan /srv /dev/sd*")]
pub(crate) struct Scan {
    /// Files, disks, directories, or patterns with * and ? in the last part
    #[arg(required = true, value_name = "PATH")]
    pub paths: Vec<PathBuf>,
}

/// The output of `pool scan --json`.
#[derive(Debug, Serialize)]
struct Scanned {
    pools: Vec<Pool>,
    without_pool: Vec<String>,
    problems: Vec<Problem>,
}

#[derive(Debug, Serialize)]
struct Pool {
    pool_id: String,
    complete: bool,
    size_bytes: u64,
    extent_size: u32,
    version: String,
    features: Vec<String>,
    clean: bool,
    /// The node that had it last, by eight digits; null where none was known.
    node: Option<String>,
    /// A process of this host that has it open.
    process: Option<u32>,
    /// Another host has it open: its claim is renewed.
    open_elsewhere: bool,
    devices: Vec<Member>,
}

#[derive(Debug, Serialize)]
struct Member {
    index: usize,
    size_bytes: u64,
    /// Empty for a device that is missing; more than one where copies or several paths exist.
    paths: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Problem {
    path: String,
    text: String,
}

/// A superblock that was found on a path.
struct Found {
    path: PathBuf,
    copy: Superblock,
    claim: Option<ClaimPage>,
    process: Option<u32>,
}

impl Scan {
    pub(crate) fn run(&self, context: &Context) -> Result<(), Error> {
        let (mut found, mut without, mut problems) = (Vec::new(), Vec::new(), Vec::new());
        for path in paths::expanded(&self.paths)? {
            let text = path.display().to_string();
            match look(&path) {
                Ok(Some(one)) => found.push(one),
                Ok(None) => without.push(text),
                Err(error) => {
                    problems.push(Problem { path: text, text: failed(error).to_string() });
                }
            }
        }
        let pools = grouped(found);
        let scanned = Scanned { pools, without_pool: without, problems };
        context.output.either(&scanned, || scanned.text(context))
    }
}

/// Reads what a path holds; `None` where it is no pool.
fn look(path: &Path) -> Result<Option<Found>, PoolError> {
    let mut device = Offline::open(&[path.to_owned()], Access::Look, Duration::ZERO)?;
    let present = device.present().to_vec();
    let copy = present.first().and_then(|one| newest_copy(&mut device, DeviceIndex(0), one));
    let spec = spec(path)?;
    let Some(copy) = copy else {
        if !holds_pool(&spec)? {
            return Ok(None);
        }
        let damaged = std::io::Error::other("it holds a pool whose superblocks are all damaged");
        return Err(PoolError::io("read", path)(damaged));
    };
    let claim = claim(&mut device).filter(|_| copy.this_device == DeviceIndex(0));
    let process = File::open(path).ok().and_then(|file| lock_owner(&file));
    Ok(Some(Found { path: path.to_owned(), copy, claim, process }))
}

fn spec(path: &Path) -> Result<DeviceSpec, PoolError> {
    let kind = kind_of(path).map_err(PoolError::io("cannot open", path))?;
    Ok(DeviceSpec { path: path.to_owned(), kind, size: None, preallocate: false, direct: false })
}

fn claim(device: &mut Offline) -> Option<ClaimPage> {
    let mut page = [0; PAGE_SIZE];
    device.read(DeviceIndex(0), CLAIM_OFFSET, &mut page).ok()?;
    Some(ClaimPage::decode(&page))
}

/// Whether another host renews the claim of a pool, by a second look at its first device.
fn is_renewed(first: &Found) -> bool {
    let Some(ClaimPage::Claim(claim)) = first.claim else { return false };
    if claim.state == ClaimState::Free || first.process.is_some() {
        return false;
    }
    std::thread::sleep(WATCH);
    let again = Offline::open(std::slice::from_ref(&first.path), Access::Look, Duration::ZERO).ok();
    again.and_then(|mut device| self::claim(&mut device)) != first.claim
}

/// The pools, by identity.
fn grouped(found: Vec<Found>) -> Vec<Pool> {
    let mut pools: BTreeMap<[u8; 16], Vec<Found>> = BTreeMap::new();
    for one in found {
        pools.entry(one.copy.pool_id).or_default().push(one);
    }
    pools.into_values().filter_map(|found| pool(&found)).collect()
}

fn pool(found: &[Found]) -> Option<Pool> {
    let newest = &found.iter().max_by_key(|one| one.copy.generation)?.copy;
    let extent = u64::from(newest.extent_size);
    let devices: Vec<Member> = newest
        .devices
        .present()
        .map(|(index, record)| {
            let is_it = |one: &&Found| usize::from(one.copy.this_device.0) == index;
            let paths = found.iter().filter(is_it).map(|one| one.path.display().to_string());
            Member { index, size_bytes: record.extents * extent, paths: paths.collect() }
        })
        .collect();
    let first = found.iter().find(|one| one.copy.this_device == DeviceIndex(0));
    Some(Pool {
        pool_id: hex(&newest.pool_id),
        complete: devices.iter().all(|one| !one.paths.is_empty()),
        size_bytes: devices.iter().map(|one| one.size_bytes).sum(),
        extent_size: newest.extent_size,
        version: format!("{}.{}", newest.major, newest.minor),
        features: features(newest),
        clean: newest.clean,
        node: (newest.node != 0).then(|| format!("{:08x}", newest.node)),
        process: found.iter().find_map(|one| one.process),
        open_elsewhere: first.is_some_and(is_renewed),
        devices,
    })
}

/// Names of the features in use; an unknown one by its word and bit.
fn features(superblock: &Superblock) -> Vec<String> {
    let words = [
        ("compat", superblock.compat),
        ("ro_compat", superblock.ro_compat),
        ("incompat", superblock.incompat),
    ];
    let name = |word: &str, bit: u64| match (word, bit) {
        ("compat", VOLUME_SETTINGS) => "volume-settings".to_owned(),
        ("compat", CLAIM_PAGE) => "claim-page".to_owned(),
        ("compat", PLACEMENT) => "placement".to_owned(),
        ("incompat", COMPOSITE) => "composite".to_owned(),
        ("incompat", DEVICE_STATES) => "device-states".to_owned(),
        _ => format!("{word}:{bit:#x}"),
    };
    let bits = words.into_iter().flat_map(|(word, bits)| {
        (0..u64::BITS).map(move |bit| (word, bits & (1 << bit))).filter(|(_, bit)| *bit != 0)
    });
    bits.map(|(word, bit)| name(word, bit)).collect()
}

impl Scanned {
    fn text(&self, context: &Context) -> String {
        let mut text = String::new();
        for pool in &self.pools {
            text.push_str(&properties(&pool.rows(context), context.output.paint()));
            text.push('\n');
        }
        for Problem { path, text: problem } in &self.problems {
            text.push_str(&format!("{path}: {problem}\n"));
        }
        let (pools, without) = (self.pools.len(), self.without_pool.len());
        text.push_str(&format!("{pools} pool(s) found; {without} path(s) hold none\n"));
        text
    }
}

impl Pool {
    fn rows(&self, context: &Context) -> Vec<(&'static str, String)> {
        let size = |bytes| context.output.size(bytes);
        let mut rows = vec![
            ("pool", self.pool_id.clone()),
            ("size", size(self.size_bytes)),
            ("version", self.version.clone()),
            (
                "features",
                if self.features.is_empty() { "-".to_owned() } else { self.features.join(" ") },
            ),
            ("state", self.state()),
        ];
        for Member { index, size_bytes, paths } in &self.devices {
            let place = match paths.as_slice() {
                [] => "missing".to_owned(),
                [one] => one.clone(),
                more => format!("{} (several paths, or copies)", more.join(" ")),
            };
            rows.push(("device", format!("{index}: {place}, {}", size(*size_bytes))));
        }
        rows
    }

    fn state(&self) -> String {
        let last = self.node.as_ref().map(|node| format!(", last on node {node}"));
        let last = last.unwrap_or_default();
        let how = match (self.process, self.open_elsewhere, self.clean) {
            (Some(process), ..) => format!("open on this host, process {process}"),
            (None, true, _) => "open on another host".to_owned(),
            (None, false, true) => "closed in order".to_owned(),
            (None, false, false) => "not closed in order".to_owned(),
        };
        let whole = if self.complete { "" } else { ", devices are missing" };
        format!("{how}{last}{whole}")
    }
}
