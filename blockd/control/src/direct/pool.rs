//! A pool of namespaces: volumes made, found again and removed.

mod create;
mod delete;
mod views;

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blockd_media::error::{Error, shown};
use blockd_pmem::platform::step::{HUGE_PAGE, Rule, Step};
use blockd_pmem::platform::{
    Inventory, Mode, Namespace, PageMap, Platform, Region, Uuid, new_uuid,
};
use serde::{Deserialize, Serialize};

use super::busy::{Busy, Held};
use super::config::DirectConfig;
use super::journal::{Content, Intent, Journal, Record};
use super::scrub::Scrubber;

pub use create::CreateWish;

/// The usage of a volume.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Usage {
    /// Applications map it.
    #[default]
    AppDirect,
    /// Reads and writes, without torn sectors.
    FileIo,
}

impl Usage {
    const fn mode(self) -> Mode {
        match self {
            Self::AppDirect => Mode::Fsdax,
            Self::FileIo => Mode::Sector,
        }
    }

    /// Its name in texts.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::AppDirect => "app-direct",
            Self::FileIo => "file-io",
        }
    }
}

/// A pool of namespaces. Clones are the same one.
#[derive(Clone, Debug)]
pub struct DirectPool(pub(super) Arc<Inner>);

#[derive(Debug)]
pub(super) struct Inner {
    pub(super) config: DirectConfig,
    pub(super) platform: Platform,
    journal: Journal,
    content: Mutex<Content>,
    /// One volume is made or removed at a time.
    changing: Mutex<()>,
    pub(super) busy: Busy,
    pub(super) scrubber: Scrubber,
    /// A volume has no device, or its growth is not finished, for something that may pass.
    pub(super) has_unfinished: AtomicBool,
}

impl DirectPool {
    /// Reads the journal, and brings to its end what a crash has left. A region that is not there
    /// is no error: the pool is known, and does not serve.
    pub fn open(config: DirectConfig, platform: Platform, state_dir: &Path) -> Result<Self, Error> {
        let journal = Journal::new(state_dir, &config.name);
        let region = config.region.to_string();
        let content = match journal.read()? {
            Some(content) if content.region != region && !content.records.is_empty() => {
                let problem = format!(
                    "has {} volumes in region {}, and region {region} is configured: delete them \
                     first, or name the pool otherwise",
                    content.records.len(),
                    content.region
                );
                return Err(Error::in_use(format!("pool {}", config.name), problem));
            }
            Some(content) => Content { region, ..content },
            None => {
                let pool = new_uuid()?.to_string();
                let content =
                    Content { pool, region, next_id: 1, has_remains: false, records: Vec::new() };
                journal.write(&content)?;
                content
            }
        };
        if config.has_percentage {
            tracing::warn!(
                pool = config.name,
                "percentage means nothing to a pool of kind pmem-direct: its volumes take what is \
                 free"
            );
        }
        let pool = Self(Arc::new(Inner {
            config,
            platform,
            journal,
            content: Mutex::new(content),
            changing: Mutex::new(()),
            busy: Busy::default(),
            scrubber: Scrubber::default(),
            has_unfinished: AtomicBool::new(false),
        }));
        pool.tidy_up()?;
        let are_all = pool.enable_all()?;
        pool.0.has_unfinished.store(!are_all, Ordering::Relaxed);
        Scrubber::start(&pool)?;
        Ok(pool)
    }

    /// Ends what goes on in the background. Unfinished work is resumed at the next start.
    pub fn close(&self) {
        self.0.scrubber.stop();
    }

    /// The pool's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.0.config.name
    }

    /// How it is configured.
    #[must_use]
    pub fn config(&self) -> &DirectConfig {
        &self.0.config
    }

    pub(super) fn content(&self) -> MutexGuard<'_, Content> {
        self.0.content.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the pool's lock: volumes are made and removed one at a time.
    pub(super) fn changing(&self) -> MutexGuard<'_, ()> {
        self.0.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the pool's lock once no thread works on a volume of that name: `wait` waits for it, or
    /// makes it give up.
    pub(super) fn changing_idle(&self, name: &str, wait: fn(&Busy, &str)) -> MutexGuard<'_, ()> {
        loop {
            let changing = self.changing();
            let records = self.records(&[Intent::Ready, Intent::Creating]).into_iter();
            let mut at_it = records.filter(|one| self.0.busy.is_held(&one.uuid));
            let Some(record) = at_it.find(|one| one.name == name) else { return changing };
            drop(changing);
            wait(&self.0.busy, &record.uuid);
        }
    }

    /// Takes the pool's lock and the volume's, once no other thread works on the volume.
    pub(super) fn changing_with(&self, uuid: &str) -> (MutexGuard<'_, ()>, Held<'_>) {
        loop {
            let changing = self.changing();
            if let Some(held) = self.0.busy.hold(uuid) {
                return (changing, held);
            }
            drop(changing);
            self.0.busy.wait(uuid);
        }
    }

    /// Changes the journal: durably, or not at all.
    pub(super) fn change(&self, change: impl FnOnce(&mut Content)) -> Result<(), Error> {
        let mut content = self.content();
        let mut next = content.clone();
        change(&mut next);
        self.0.journal.write(&next)?;
        *content = next;
        Ok(())
    }

    fn forget(&self, uuid: &str) -> Result<(), Error> {
        self.change(|content| content.records.retain(|one| one.uuid != uuid))
    }

    pub(super) fn records(&self, intents: &[Intent]) -> Vec<Record> {
        let content = self.content();
        let is_one = |one: &&Record| intents.contains(&one.intent);
        content.records.iter().filter(is_one).cloned().collect()
    }

    /// Removes the namespaces that were being created or removed when the daemon ended. A removal
    /// that fails is retried later; a failed read ends it.
    pub(super) fn tidy_up(&self) -> Result<(), Error> {
        let _changing = self.changing();
        let left = self.records(&[Intent::Creating, Intent::Deleting]);
        let inventory = self.0.platform.read()?;
        if self.region(&inventory).is_err() {
            return Ok(());
        }
        for record in left.into_iter().filter(|one| !self.0.busy.is_held(&one.uuid)) {
            match self.destroy(&record) {
                Ok(was_there) => {
                    self.forget(&record.uuid)?;
                    let (pool, volume) = (self.name(), &record.name);
                    tracing::info!(pool, volume, was_there, "what was begun of it is removed");
                }
                Err(error) => {
                    let (pool, volume) = (self.name(), &record.name);
                    tracing::warn!(
                        pool,
                        volume,
                        %error,
                        "what was begun of it can't be removed yet"
                    );
                }
            }
        }
        Ok(())
    }

    /// Gives volumes their devices again that have none, as after a crash while one was grown.
    /// Whether all have one.
    fn enable_all(&self) -> Result<bool, Error> {
        let _changing = self.changing();
        let mut are_all = true;
        let inventory = self.0.platform.read()?;
        if self.region(&inventory).is_err() {
            // A missing namespace may still appear.
            return Ok(false);
        }
        for record in self.records(&[Intent::Ready]) {
            let uuid = uuid_of(&record)?;
            let is_off = |one: &Namespace| one.device.is_none();
            if !inventory.namespace(uuid).is_some_and(|(_, one)| is_off(one)) {
                continue;
            }
            let (pool, volume) = (self.name(), &record.name);
            match self.0.platform.ensure_enabled(uuid) {
                Ok(_) => tracing::info!(pool, volume, "its namespace is enabled again"),
                Err(error) => {
                    let error = error.text();
                    tracing::warn!(pool, volume, error, "its namespace can't be enabled");
                    are_all = false;
                }
            }
        }
        Ok(are_all)
    }

    /// Tries again what failed for something that may have passed.
    pub(super) fn go_on(&self) -> Result<(), Error> {
        if !self.records(&[Intent::Creating, Intent::Deleting]).is_empty() {
            self.tidy_up()?;
        }
        if self.0.has_unfinished.swap(false, Ordering::Relaxed) {
            let are_all =
                self.enable_all().and_then(|enabled| Ok(self.finish_growths()? && enabled));
            if !matches!(are_all, Ok(true)) {
                self.0.has_unfinished.store(true, Ordering::Relaxed);
            }
            are_all?;
        }
        Ok(())
    }

    /// Why it does not serve.
    #[must_use]
    pub fn failure(&self) -> Option<String> {
        match self.0.platform.read() {
            Ok(inventory) => self.region(&inventory).err().map(|error| error.to_string()),
            Err(error) => Some(error.text()),
        }
    }

    pub(super) fn region<'a>(&self, inventory: &'a Inventory) -> Result<&'a Region, Error> {
        self.seen(inventory).map_err(|problem| {
            let problem = format!("has failed: its region {} {problem}", self.0.config.region);
            Error::in_use(format!("pool {}", self.name()), problem)
        })
    }

    /// The region, if what is not seen in it is not there: otherwise nothing is taken for gone.
    fn seen<'a>(&self, inventory: &'a Inventory) -> Result<&'a Region, &'static str> {
        let region = inventory.region(&self.0.config.region).ok_or("is not there")?;
        region.hides().map_or(Ok(region), Err)
    }

    /// In which steps sizes go. The map of a sector namespace has no pages.
    pub(super) fn step(&self, region: &Region, rule: Rule) -> Result<Step, Error> {
        Step::of(region, HUGE_PAGE, rule).ok_or_else(|| {
            let problem = format!("has {} ways: that is beyond all sizes", region.ways);
            Error::in_use(format!("region {}", region.key), problem)
        })
    }

    fn map(&self, usage: Usage) -> PageMap {
        if usage == Usage::FileIo { PageMap::Memory } else { self.0.config.page_map }
    }

    pub(super) fn named(&self, name: &str, intents: &[Intent]) -> Option<Record> {
        self.records(intents).into_iter().find(|one| one.name == name)
    }
}

fn length_of(ranges: &[std::ops::Range<u64>]) -> u64 {
    ranges.iter().map(|range| range.end - range.start).sum()
}

pub(super) fn uuid_of(record: &Record) -> Result<Uuid, Error> {
    record.uuid.parse().map_err(|allowed| Error::Corrupt {
        what: format!("volume {}", shown(&record.name)),
        problem: format!("its uuid is {:?}: must be {allowed}", record.uuid),
    })
}
