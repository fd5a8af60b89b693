//! A pool and its volumes as they are shown.

use blockd_media::error::Error;
use blockd_pmem::platform::step::HUGE_PAGE;
use blockd_pmem::platform::{
    Inventory, Mode, Namespace, Region, Uuid, choose, raw_size_for, usable_of,
};

use super::super::config::SizeRule;
use super::super::describe::{PoolView, Space, State, VolumeView, durability};
use super::super::growth::{GROWS, is_bare};
use super::super::journal::{Intent, Record};
use super::{DirectPool, length_of, uuid_of};

impl DirectPool {
    /// Finds a volume by name; one that is being removed counts only if no other has the name.
    pub fn get(&self, name: &str) -> Result<VolumeView, Error> {
        let all = [Intent::Ready, Intent::Creating, Intent::Scrubbing, Intent::Deleting];
        let found = all.iter().find_map(|intent| self.named(name, &[*intent]));
        let record = found.ok_or_else(|| Error::not_found("volume", name))?;
        Ok(self.view(&record, self.0.platform.read().ok().as_ref()))
    }

    /// This volume, whatever else has its name by now.
    pub(in super::super) fn view_of(&self, record: &Record) -> Result<VolumeView, Error> {
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

    pub(in super::super) fn view(
        &self,
        record: &Record,
        inventory: Option<&Inventory>,
    ) -> VolumeView {
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
