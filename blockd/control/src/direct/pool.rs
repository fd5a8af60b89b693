//! A pool of namespaces: volumes made, found again and removed.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blockd_media::clock::wall_ms;
use blockd_media::error::{Error, shown};
use blockd_media::names::check_name;
use blockd_pmem::platform::choose;
use blockd_pmem::platform::provision::{MAX_NAME, NamespaceSpec};
use blockd_pmem::platform::step::{HUGE_PAGE, Rule, Step};
use blockd_pmem::platform::{
    Inventory, Mode, Namespace, PageMap, Platform, Region, Uuid, new_uuid, raw_size_for, usable_of,
};
use serde::{Deserialize, Serialize};

use super::busy::{Busy, Held};
use super::config::{DirectConfig, SizeRule};
use super::describe::{PoolView, Space, State, VolumeView, durability};
use super::growth::{GROWS, is_bare};
use super::journal::{Content, Intent, Journal, Record};
use super::scrub::Scrubber;

/// How often a namespace is made larger when the kernel leaves less of it usable than expected.
const SIZE_TRIES: u32 = 4;

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

/// A volume to be made.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CreateWish {
    /// The volume's name.
    pub name: String,
    /// Bytes at least, by the rule.
    pub size: u64,
    /// Bytes at most, by the rule; 0 for any.
    pub limit: u64,
    /// The volume's usage.
    pub usage: Usage,
    /// Whether it is overwritten before its space is free.
    pub erase_after: bool,
    /// The bytes that the size counts, if different from the pool's rule.
    pub size_rule: Option<SizeRule>,
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

    /// Removes the namespace of a record; false if there is none.
    fn destroy(&self, record: &Record) -> Result<bool, Error> {
        Ok(self.0.platform.destroy(&self.0.config.region, uuid_of(record)?)?)
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

    /// Bytes to take for a volume of that size.
    pub(super) fn raw_size(&self, wish: &CreateWish, step: Step) -> Result<u64, Error> {
        let (mode, map) = (wish.usage.mode(), self.map(wish.usage));
        let size = match wish.size_rule.unwrap_or(self.0.config.size_rule) {
            SizeRule::Usable => raw_size_for(mode, map, HUGE_PAGE, wish.size, step),
            SizeRule::Charged => step.round_up(wish.size).and_then(|size| {
                // A volume without a namespace does not exist any more.
                raw_size_for(mode, map, HUGE_PAGE, 1, step).map(|least| size.max(least))
            }),
        };
        size.filter(|size| i64::try_from(*size).is_ok())
            .ok_or_else(|| Error::invalid("size_bytes", wish.size, "less than 2^63 when rounded"))
    }

    /// Makes a volume. True if it is new.
    pub fn create(&self, wish: &CreateWish) -> Result<(bool, VolumeView), Error> {
        check_name(&wish.name).map_err(|allowed| Error::invalid("name", &wish.name, allowed))?;
        if wish.size == 0 {
            return Err(Error::invalid("size_bytes", 0, "more than 0"));
        }
        let changing = self.changing_idle(&wish.name, Busy::wait);
        let inventory = self.0.platform.read()?;
        let region = self.region(&inventory)?;
        if let Some(there) = self.named(&wish.name, &[Intent::Ready]) {
            return self.same(wish, &there, &inventory).map(|view| (false, view));
        }
        if let Some(left) = self.named(&wish.name, &[Intent::Creating, Intent::Deleting]) {
            self.destroy(&left)?;
            self.forget(&left.uuid)?;
        }
        let step = self.step(region, self.0.config.alignment)?;
        let mut raw = self.raw_size(wish, step)?;
        let rule = wish.size_rule.unwrap_or(self.0.config.size_rule);
        for _ in 0..SIZE_TRIES {
            check_limit(wish, raw, step)?;
            choose::fits(region, raw).map_err(no_room)?;
            let (record, made) = self.make(wish, raw)?;
            let usable = made.usable.unwrap_or(0);
            if rule == SizeRule::Usable && usable < wish.size {
                self.destroy(&record)?;
                self.forget(&record.uuid)?;
                raw = raw.checked_add(step.bytes()).ok_or_else(|| {
                    Error::invalid("size_bytes", wish.size, "less than 2^63 when rounded")
                })?;
                continue;
            }
            self.hand_over(&record, &made, changing)?;
            return Ok((true, self.view_of(&record)?));
        }
        let problem = format!("{raw} bytes of it are too few for {} usable ones", wish.size);
        Err(Error::Unexpected { what: format!("region {}", region.key), problem })
    }

    /// Notes that the volume is handed out, once it holds no data of another volume.
    fn hand_over(
        &self,
        record: &Record,
        made: &Namespace,
        changing: MutexGuard<'_, ()>,
    ) -> Result<(), Error> {
        let mut changing = Some(changing);
        let held = self.0.busy.hold(&record.uuid);
        if self.content().has_remains
            && let Some(held) = &held
        {
            // An earlier volume may have left data where it is now.
            drop(changing.take());
            let zeroing = self.0.platform.zeroing(made, 0).map_err(Error::from);
            if let Err(error) = zeroing.and_then(|zeroing| self.overwrite(record, zeroing, held)) {
                // It is not handed out yet. Where it cannot be removed now, it is removed later.
                let _changing = self.changing();
                self.destroy(record)?;
                self.forget(&record.uuid)?;
                return Err(error);
            }
        }
        let usable = made.usable.unwrap_or(0);
        let _changing = changing.unwrap_or_else(|| self.changing());
        self.change(|content| {
            for one in content.records.iter_mut().filter(|one| one.uuid == record.uuid) {
                (one.intent, one.usable_bytes) = (Intent::Ready, usable);
            }
        })
    }

    fn make(&self, wish: &CreateWish, raw: u64) -> Result<(Record, Namespace), Error> {
        let uuid = new_uuid()?;
        let mut record = Record {
            uuid: uuid.to_string(),
            name: wish.name.clone(),
            id: 0,
            intent: Intent::Creating,
            usage: wish.usage,
            requested_bytes: wish.size,
            charged_bytes: raw,
            usable_bytes: 0,
            erase_after: wish.erase_after,
            made_unix_ms: wall_ms(),
            scrubbed_bytes: 0,
            grows_to: None,
            grows_at: None,
            dirty_from: None,
        };
        self.change(|content| {
            record.id = content.next_id;
            content.next_id = content.next_id.saturating_add(1);
            content.records.push(record.clone());
        })?;
        let order = NamespaceSpec {
            uuid,
            alt_name: self.label(&wish.name, uuid),
            mode: wish.usage.mode(),
            map: self.map(wish.usage),
            align: HUGE_PAGE,
            size: raw,
        };
        match self.0.platform.create(&self.0.config.region, &order) {
            Ok(made) => Ok((record, made)),
            Err(error) => {
                // If a part of it is left, the journal still has it, and it is removed later.
                if !matches!(error, blockd_pmem::platform::PlatformError::NotTakenBack { .. }) {
                    self.forget(&record.uuid)?;
                }
                Err(error.into())
            }
        }
    }

    /// The volume's name, as far as a label has room.
    fn label(&self, name: &str, uuid: Uuid) -> String {
        let whole = format!("{}{name}", self.0.config.name_prefix);
        if whole.len() <= MAX_NAME {
            return whole;
        }
        let tail = uuid.to_string();
        let (tail, mut room) = (&tail[..8], MAX_NAME - 9);
        while !whole.is_char_boundary(room) {
            room -= 1;
        }
        format!("{}-{tail}", &whole[..room])
    }

    /// One that is there already, if it is what is wished for.
    fn same(
        &self,
        wish: &CreateWish,
        there: &Record,
        inventory: &Inventory,
    ) -> Result<VolumeView, Error> {
        let other = |field: &str, existing: String, asked: String| {
            let (what, name, field) = ("volume", shown(&wish.name), field.to_owned());
            Err(Error::Exists { what, name, field, existing, asked })
        };
        if there.usage != wish.usage {
            return other("usage", there.usage.name().into(), wish.usage.name().into());
        }
        let view = self.view(there, Some(inventory));
        let rule = wish.size_rule.unwrap_or(self.0.config.size_rule);
        let has = if rule == SizeRule::Charged { view.charged } else { view.usable };
        let is_within = wish.limit == 0 || view.charged <= wish.limit;
        let is_it = there.requested_bytes == wish.size || (has >= wish.size && wish.limit != 0);
        if is_it && is_within && has >= wish.size {
            return Ok(view);
        }
        other("size in bytes", has.to_string(), wish.size.to_string())
    }

    pub(super) fn named(&self, name: &str, intents: &[Intent]) -> Option<Record> {
        self.records(intents).into_iter().find(|one| one.name == name)
    }

    /// Removes a volume; nothing if there is none of that name. With `erase_after` its space is
    /// free when it has been overwritten, which goes on in the background: the state that is
    /// answered says which it is.
    pub fn delete(&self, name: &str) -> Result<Option<VolumeView>, Error> {
        let _changing = self.changing_idle(name, Busy::give_up);
        let Some(record) = self.named(name, &[Intent::Ready, Intent::Creating]) else {
            return Ok(None);
        };
        let mut inventory = self.0.platform.read_with_users()?;
        self.region(&inventory)?;
        let mut before = self.view(&record, Some(&inventory));
        let uuid = uuid_of(&record)?;
        let scrubs = record.erase_after && record.intent == Intent::Ready;
        let is_off = inventory.namespace(uuid).is_some_and(|(_, one)| one.device.is_none());
        if scrubs && is_off {
            // Without a device it can't be overwritten, and the next owner of the space could read
            // it.
            self.enable_to_clear(&record).map_err(|error| {
                let problem = format!("is not enabled, so that it can't be overwritten: {error}");
                Error::in_use(format!("volume {}", shown(name)), problem)
            })?;
            inventory = self.0.platform.read_once_looked_at(uuid)?;
            self.region(&inventory)?;
        }
        let Some((_, namespace)) = inventory.namespace(uuid) else {
            // It was removed by other means, and not overwritten.
            self.change(|content| {
                content.has_remains |= record.intent == Intent::Ready;
                content.records.retain(|one| one.uuid != record.uuid);
            })?;
            before.state = State::Deleting;
            return Ok(Some(before));
        };
        if !namespace.users.is_empty() {
            let users: Vec<String> = namespace.users.iter().map(ToString::to_string).collect();
            let problem = format!("is in use: {}", users.join(", "));
            return Err(Error::in_use(format!("volume {}", shown(name)), problem));
        }
        // From here on no user can open the volume that is about to be deleted.
        let held = match namespace.device {
            None if !scrubs => None,
            _ => Some(self.0.platform.zeroing(namespace, 0)?),
        };
        let is_sector = namespace.mode == Mode::Sector;
        let intent = if scrubs { Intent::Scrubbing } else { Intent::Deleting };
        before.state = if scrubs { State::Scrubbing } else { State::Deleting };
        self.change(|content| {
            content.has_remains |= record.intent == Intent::Ready && !scrubs;
            for one in content.records.iter_mut().filter(|one| one.uuid == record.uuid) {
                (one.intent, one.scrubbed_bytes) = (intent, 0);
            }
        })?;
        match held {
            // A sector namespace is made bare first, which needs it closed.
            held if scrubs => self.0.scrubber.take(record.uuid, held.filter(|_| !is_sector)),
            held => {
                drop(held);
                self.destroy(&record)?;
                self.forget(&record.uuid)?;
            }
        }
        Ok(Some(before))
    }

    /// Gives a namespace a device that it can be overwritten by. Bare, it needs no memory for its
    /// pages; true if that is what it became.
    pub(super) fn enable_to_clear(&self, record: &Record) -> Result<bool, Error> {
        let uuid = uuid_of(record)?;
        let error = match self.0.platform.ensure_enabled(uuid) {
            Ok(_) => return Ok(false),
            Err(error) if record.usage == Usage::FileIo => return Err(error.into()),
            Err(error) => error,
        };
        if record.scrubbed_bytes > 0 {
            // Those were others: bare, it begins with what the kernel keeps about it.
            self.note_scrubbed(record, 0)?;
        }
        // If it is not deleted then, it is restored.
        self.0.has_unfinished.store(true, Ordering::Relaxed);
        self.0.platform.make_bare(uuid).map_err(|_| error)?;
        Ok(true)
    }

    /// Notes how much of what is deleted has been overwritten.
    pub(super) fn note_scrubbed(&self, record: &Record, done: u64) -> Result<(), Error> {
        self.change(|content| {
            for one in content.records.iter_mut().filter(|one| one.uuid == record.uuid) {
                one.scrubbed_bytes = done;
            }
        })
    }

    /// Removes what has been overwritten.
    pub(super) fn scrubbed(&self, record: &Record) -> Result<(), Error> {
        let _changing = self.changing();
        self.change(|content| {
            for one in content.records.iter_mut().filter(|one| one.uuid == record.uuid) {
                one.intent = Intent::Deleting;
            }
        })?;
        self.destroy(record)?;
        self.forget(&record.uuid)
    }

    /// A volume; one that is being removed counts where there is no other of the name.
    pub fn get(&self, name: &str) -> Result<VolumeView, Error> {
        let all = [Intent::Ready, Intent::Creating, Intent::Scrubbing, Intent::Deleting];
        let found = all.iter().find_map(|intent| self.named(name, &[*intent]));
        let record = found.ok_or_else(|| Error::not_found("volume", name))?;
        Ok(self.view(&record, self.0.platform.read().ok().as_ref()))
    }

    /// This volume, whatever else has its name by now.
    pub(super) fn view_of(&self, record: &Record) -> Result<VolumeView, Error> {
        let found = self.content().records.iter().find(|one| one.uuid == record.uuid).cloned();
        let found = found.ok_or_else(|| Error::not_found("volume", &record.name))?;
        Ok(self.view(&found, self.0.platform.read().ok().as_ref()))
    }

    /// Names of the devices of all volumes, also of those that must not be used now.
    pub fn device_names(&self) -> Result<Vec<String>, Error> {
        let inventory = self.0.platform.read()?;
        let records = self.content().records.clone();
        let uuids = records.iter().filter_map(|one| uuid_of(one).ok());
        let namespaces = uuids.filter_map(|uuid| inventory.namespace(uuid));
        let device = |one: &Namespace| one.device.as_ref().map(|device| device.name.clone());
        Ok(namespaces.filter_map(|(_, one)| device(one)).collect())
    }

    /// All volumes, with those that are being removed, in the order in which they were made.
    #[must_use]
    pub fn list(&self) -> Vec<VolumeView> {
        let inventory = self.0.platform.read().ok();
        let mut records = self.content().records.clone();
        records.sort_by_key(|one| one.id);
        records.iter().map(|one| self.view(one, inventory.as_ref())).collect()
    }

    pub(super) fn view(&self, record: &Record, inventory: Option<&Inventory>) -> VolumeView {
        let uuid = record.uuid.parse::<Uuid>().ok();
        let namespace = inventory
            .and_then(|inventory| uuid.and_then(|uuid| inventory.namespace(uuid)))
            .map(|(_, namespace)| namespace);
        let device = namespace.and_then(|one| one.device.clone());
        // Its new end may hold another's data then, and it must not be used.
        let grows = |one: &Namespace| record.grows() || is_bare(record, one);
        let has_other_mode = |one: &Namespace| {
            record.intent == Intent::Ready
                && one.device.is_some()
                && one.mode != record.usage.mode()
        };
        let problem = match (inventory.map(|all| self.seen(all)), namespace, &device) {
            (None, ..) => Some("persistent memory can't be read".to_owned()),
            (Some(Err(why)), ..) => Some(format!("region {} {why}", self.0.config.region)),
            (_, None, _) => Some(format!("its namespace {} is gone", record.uuid)),
            (_, Some(_), _) if record.grows() => Some(GROWS.to_owned()),
            (_, Some(one), _) if is_bare(record, one) => {
                Some("its namespace is bare: growing or deleting it was cut short".to_owned())
            }
            (_, Some(_), None) => Some("its namespace is not enabled".to_owned()),
            (_, Some(one), _) if has_other_mode(one) => {
                let (usage, needed) = (record.usage.name(), record.usage.mode());
                let found = one.mode;
                Some(format!("its namespace is of mode {found}, and usage {usage} needs {needed}"))
            }
            _ => None,
        };
        let unusable = namespace.is_some_and(|one| grows(one) || has_other_mode(one));
        let (device, usable) = match namespace.and_then(|one| one.usable) {
            Some(usable) if !unusable => (device, usable),
            _ => (device.filter(|_| !unusable), record.usable_bytes),
        };
        let scrubbed = self.0.scrubber.done(&record.uuid).unwrap_or(record.scrubbed_bytes);
        let state = match record.intent {
            Intent::Creating => State::Creating,
            Intent::Ready => State::Ready,
            Intent::Scrubbing => State::Scrubbing,
            Intent::Deleting => State::Deleting,
        };
        VolumeView {
            name: record.name.clone(),
            id: record.id,
            state,
            usage: record.usage,
            usable,
            charged: record.charged_bytes,
            erase_after: record.erase_after,
            made_unix_ms: record.made_unix_ms,
            scrubbed,
            problem: problem.filter(|_| state == State::Ready),
            bad_bytes: namespace.map_or(0, |one| length_of(&one.bad_blocks)),
            device: device.filter(|_| state == State::Ready),
        }
    }

    /// The pool with its space.
    #[must_use]
    pub fn describe(&self) -> PoolView {
        let read = self.0.platform.read();
        let (inventory, failure) = match read {
            Ok(inventory) => {
                let failure = self.region(&inventory).err().map(|error| error.to_string());
                (Some(inventory), failure)
            }
            Err(error) => (None, Some(error.text())),
        };
        let region = inventory.as_ref().and_then(|all| all.region(&self.0.config.region));
        let records = self.content().records.clone();
        let charged = |intent: &[Intent]| {
            let of = records.iter().filter(|one| intent.contains(&one.intent));
            of.map(|one| one.charged_bytes).sum::<u64>()
        };
        let all = [Intent::Ready, Intent::Creating, Intent::Scrubbing, Intent::Deleting];
        let is_volume = |one: &&Record| matches!(one.intent, Intent::Ready | Intent::Creating);
        let id = self.content().pool.parse::<Uuid>().map(|uuid| uuid.0).unwrap_or_default();
        PoolView {
            name: self.name().to_owned(),
            id,
            region: self.0.config.region.to_string(),
            failure,
            space: region.and_then(|region| self.space(region)),
            durability: durability(region, self.0.config.power_safe),
            charged: charged(&all),
            scrubbing: charged(&[Intent::Scrubbing, Intent::Deleting]),
            promised: records.iter().filter(is_volume).map(|one| one.usable_bytes).sum(),
            volumes: records.iter().filter(is_volume).count(),
        }
    }

    fn space(&self, region: &Region) -> Option<Space> {
        let step = self.step(region, self.0.config.alignment).ok()?;
        let (mode, map) = (Mode::Fsdax, self.0.config.page_map);
        let sized = |raw: u64| match self.0.config.size_rule {
            SizeRule::Usable => usable_of(mode, map, HUGE_PAGE, raw),
            SizeRule::Charged => raw,
        };
        let largest = step.round_down(region.max_available_extent.min(region.available));
        let smallest = raw_size_for(mode, map, HUGE_PAGE, 1, step)?;
        let fits = choose::fits(region, largest.max(smallest)).is_ok();
        Some(Space {
            total: region.size,
            available: region.available,
            largest_piece: region.max_available_extent,
            largest_volume: if fits { sized(largest) } else { 0 },
            step: step.bytes(),
            smallest_volume: sized(smallest),
            numa_node: region.numa_node,
            bad_bytes: length_of(&region.bad_blocks),
        })
    }
}

/// Nothing more than the limit is taken.
fn check_limit(wish: &CreateWish, raw: u64, step: Step) -> Result<(), Error> {
    if wish.limit == 0 || raw <= wish.limit {
        return Ok(());
    }
    let size = wish.size;
    let allowed = format!("at least {raw}, which {size} bytes take: sizes go in {step}");
    Err(Error::invalid("limit_bytes", wish.limit, allowed))
}

fn length_of(ranges: &[std::ops::Range<u64>]) -> u64 {
    ranges.iter().map(|range| range.end - range.start).sum()
}

fn no_room(refusal: choose::Refusal) -> Error {
    let refused = choose::NoRoom { refusals: vec![refusal] };
    blockd_pmem::platform::PlatformError::from(refused).into()
}

pub(super) fn uuid_of(record: &Record) -> Result<Uuid, Error> {
    record.uuid.parse().map_err(|allowed| Error::Corrupt {
        what: format!("volume {}", shown(&record.name)),
        problem: format!("its uuid is {:?}: must be {allowed}", record.uuid),
    })
}
