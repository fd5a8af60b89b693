//! Making a volume of a pool of namespaces.

use std::sync::MutexGuard;

use blockd_media::clock::wall_ms;
use blockd_media::error::{Error, shown};
use blockd_media::names::check_new_name;
use blockd_pmem::platform::provision::{MAX_NAME, NamespaceSpec};
use blockd_pmem::platform::step::{HUGE_PAGE, Step};
use blockd_pmem::platform::{Inventory, Namespace, Uuid, choose, new_uuid, raw_size_for};

use super::super::busy::Busy;
use super::super::config::SizeRule;
use super::super::describe::VolumeView;
use super::super::journal::{Intent, Record};
use super::{DirectPool, Usage};

/// How often a namespace is made larger when the kernel leaves less of it usable than expected.
const SIZE_TRIES: u32 = 4;

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

/// Nothing more than the limit is taken.
fn check_limit(wish: &CreateWish, raw: u64, step: Step) -> Result<(), Error> {
    if wish.limit == 0 || raw <= wish.limit {
        return Ok(());
    }
    let size = wish.size;
    let allowed = format!("at least {raw}, which {size} bytes take: sizes go in {step}");
    Err(Error::invalid("limit_bytes", wish.limit, allowed))
}

fn no_room(refusal: choose::Refusal) -> Error {
    let refused = choose::NoRoom { refusals: vec![refusal] };
    blockd_pmem::platform::PlatformError::from(refused).into()
}

impl DirectPool {
    /// Bytes to take for a volume of that size.
    pub(in super::super) fn raw_size(&self, wish: &CreateWish, step: Step) -> Result<u64, Error> {
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
        check_new_name(&wish.name)
            .map_err(|allowed| Error::invalid("name", &wish.name, allowed))?;
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

    /// Compares an existing volume with the request; the error names the first difference.
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
}
