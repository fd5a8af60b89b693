//! CreateVolume. Each step can be repeated, and a repeat finds the results of an earlier call:
//! make, set, answer; for the clone of a volume: snapshot, clone, set, delete the snapshot, answer.

use std::collections::HashMap;
use std::sync::Arc;

use blockd_api::v1;
use blockd_csi_base::bytes::Bytes;

use crate::capability::{Capability, FileSystem, Reach};
use crate::config::{Class, Kind};
use crate::error::Error;
use crate::ids::{SnapshotId, VolumeId};
use crate::labels::{self, Labels};
use crate::limits;
use crate::mkfs;
use crate::parameters::{ClassParameters, Keys, Mutable, mkfs_options};
use crate::plugin::{Plugin, Pools};
use crate::pmem::{self, Plan};
use crate::proto;
use crate::proto::volume_content_source::{SnapshotSource, Type, VolumeSource};
use crate::provision::{self, CreateSpec};
use crate::room;
use crate::sizes::{self, Range, Rules};

use super::cells;

/// A request that was looked through, without asking the daemon.
pub(super) struct Asked {
    pub(super) name: String,
    range: Range,
    capabilities: Vec<Capability>,
    pub(super) parameters: ClassParameters,
    pub(super) mutable: Mutable,
    pub(super) class: Class,
    pub(super) pmem: Plan,
    content: Option<proto::VolumeContentSource>,
}

/// The content source of a new volume.
pub(super) enum Source {
    Nothing,
    /// `None`: it is gone.
    Snapshot(SnapshotId, Option<v1::Volume>),
    Volume(VolumeId, Option<v1::Volume>),
}

pub(super) async fn create(
    plugin: Arc<Plugin>,
    request: proto::CreateVolumeRequest,
) -> Result<proto::CreateVolumeResponse, Error> {
    let settings = &plugin.settings;
    let asked = Asked::parse(&plugin, &request)?;
    let _name = plugin.locks.take_name("volume", &asked.name)?;
    if let Some(group) = &asked.parameters.volume_group {
        return cells::create(&plugin, &request, &asked, group).await;
    }
    settings.place.check(request.accessibility_requirements.as_ref())?;
    let pools = plugin.pools().await?;
    let pool = asked.pool(&plugin, &pools).await?;
    settings.names.check_pool("the name of the pool", &pool.name)?;
    let id = settings.names.volume(&pool.name, &asked.name);
    let _id = plugin.locks.take(&id.to_string())?;
    refuse_elsewhere(&plugin, &pools, &id).await?;
    let source = Source::find(&plugin, &pools, &asked).await?;
    let mutable = asked.parameters.mutable.clone().under(asked.mutable.clone());
    let keys = &settings.keys;
    let mut stored = asked.context_of_fs(&plugin);
    let usage =
        asked.pmem.usage.map(|usage| (keys.of_context(pmem::USAGE), usage.name().to_owned()));
    stored.extend(usage);
    let labels = labels::of_volume(keys, &asked.class.name, &request.parameters, &stored);
    asked.check_driver(&plugin, &labels)?;
    let spec = |size| CreateSpec {
        class: &asked.class,
        pool: &id.pool,
        name: &id.name,
        size,
        limit: asked.device_limit(),
        mutable: &mutable,
        pmem: asked.pmem,
        labels: &labels,
    };
    let volume = match plugin.daemon.find_volume(&id.pool, &id.name).await? {
        Some(present) => {
            let size = asked.check_present(&plugin, &present, &source)?;
            let volume = provision::finish(&plugin, &spec(size), present, false).await?;
            source.forget(&plugin, &id).await?;
            volume
        }
        None => {
            source.check_new(pool)?;
            source.check_encryption(&plugin, &asked)?;
            let size = asked.size(&plugin, pool, &source)?;
            source.make(&plugin, &id, &spec(size)).await?
        }
    };
    let context = asked.context(&plugin, pool, &volume);
    Ok(proto::CreateVolumeResponse {
        volume: Some(proto::Volume {
            capacity_bytes: plugin.capacity(&volume).get(),
            volume_id: id.to_string(),
            volume_context: context,
            content_source: asked.content,
            accessible_topology: vec![settings.place.to_wire()],
        }),
    })
}

/// A name is that of one volume, whatever its pool.
async fn refuse_elsewhere(plugin: &Plugin, pools: &Pools, id: &VolumeId) -> Result<(), Error> {
    for pool in pools.names().filter(|&pool| pool != id.pool) {
        if plugin.daemon.find_volume(pool, &id.name).await?.is_some() {
            return Err(Error::exists(("volume", &id.name), "pool", pool, &id.pool));
        }
    }
    Ok(())
}

impl Asked {
    fn parse(plugin: &Plugin, request: &proto::CreateVolumeRequest) -> Result<Self, Error> {
        let keys = &plugin.settings.keys;
        limits::name("name", &request.name)?;
        let parameters = keys.class("parameters", &request.parameters);
        let reach = parameters.as_ref().map_or(Reach::Node, ClassParameters::reach);
        let wire = &request.volume_capabilities;
        let capabilities = Capability::parse_all_for(reach, "volume_capabilities", wire)?;
        limits::map("secrets", &request.secrets)?;
        let range = Range::parse("capacity_range", request.capacity_range.as_ref())?;
        let parameters = parameters?;
        let mutable = keys.mutable("mutable_parameters", &request.mutable_parameters)?;
        let class = class_of(plugin, &parameters)?;
        let pmem = parameters.pmem.of_class("parameters.", &class)?;
        parameters.check_encryption(&pmem)?;
        let content = request.volume_content_source.clone();
        let name = request.name.clone();
        let asked = Self { name, range, capabilities, parameters, mutable, class, pmem, content };
        for (index, one) in asked.capabilities.iter().enumerate() {
            let field = format!("volume_capabilities[{index}]");
            pmem.check(&field, one, asked.fs(one))?;
            asked.parameters.check_use(&field, one)?;
            if let (Some(text), Some(file_system)) = (&asked.parameters.mkfs_options, asked.fs(one))
            {
                let field = keys.mkfs_options();
                mkfs::check(&field, file_system, &mkfs_options(&field, text)?)?;
            }
        }
        asked.check_direct()?;
        asked.check_group(keys)?;
        Ok(asked)
    }

    /// Refuses a driver whose name can't begin a label where encryption needs one.
    pub(super) fn check_driver(&self, plugin: &Plugin, labels: &Labels) -> Result<(), Error> {
        let settings = &plugin.settings;
        if !self.parameters.encrypted || !labels::header(&settings.keys, labels).is_zero() {
            return Ok(());
        }
        let allowed =
            "without capital letters for encrypted volumes, as it begins a label of theirs";
        Err(Error::invalid("the driver's name", &settings.driver, allowed))
    }

    /// Refuses features that a volume in a cell of its own can't have.
    fn check_group(&self, keys: &Keys) -> Result<(), Error> {
        if self.parameters.volume_group.is_none() {
            return Ok(());
        }
        if self.content.is_some() {
            let allowed = "left out with volume-group: a clone would be in the cell of its source, \
                           and could be used on the node of that alone";
            return Err(Error::invalid("volume_content_source", "given", allowed));
        }
        self.mutable.check_group(keys)
    }

    /// Refuses features that need a layer between a volume and its device.
    fn check_direct(&self) -> Result<(), Error> {
        if self.class.kind != Kind::PmemDirect {
            return Ok(());
        }
        let what = format!(
            "left out: volumes of class {} are the kernel's own devices, with nothing in between",
            self.class.name
        );
        if self.content.is_some() {
            return Err(Error::invalid("volume_content_source", "given", what));
        }
        if !self.parameters.mutable.is_empty() || !self.mutable.is_empty() {
            let field = "one of iops, bandwidth, on-full, placement, reservation and quota";
            return Err(Error::invalid(field, "given", what));
        }
        Ok(())
    }

    /// The pool that it is in or goes to.
    async fn pool<'a>(&self, plugin: &Plugin, pools: &'a Pools) -> Result<&'a v1::Pool, Error> {
        let name = plugin.settings.names.volume("", &self.name).name;
        let mut serving: Vec<&v1::Pool> = pools.serving(&self.class).collect();
        if serving.len() > 1 {
            for pool in &serving {
                if plugin.daemon.find_volume(&pool.name, &name).await?.is_some() {
                    return Ok(pool);
                }
            }
            // A volume with a source has to be in the source's pool.
            if let Some(of) = self.content.as_ref().and_then(|one| source_pool(plugin, one)) {
                serving.retain(|pool| pool.name == of);
                if let [pool] = serving.as_slice() {
                    return Ok(pool);
                }
            }
        }
        room::best_pool(plugin, pools, &self.class).await
    }

    /// The size of a volume that is there, if it is the one that is asked for.
    pub(super) fn check_present(
        &self,
        plugin: &Plugin,
        present: &v1::Volume,
        source: &Source,
    ) -> Result<Bytes, Error> {
        let it = ("volume", present.name.as_str());
        if present.kind() != v1::VolumeKind::Volume {
            return Err(Error::exists(it, "kind", "snapshot", "volume"));
        }
        // One without any label was not finished.
        let is_encrypted = !plugin.header(present).is_zero();
        if is_encrypted != self.parameters.encrypted && !present.labels.is_empty() {
            let text = |is: bool| if is { blockd_luks::KIND } else { "none" };
            let (there, asked) = (text(is_encrypted), text(self.parameters.encrypted));
            return Err(Error::exists(it, "encryption", there, asked));
        }
        let device = Bytes::new(present.size_bytes).unwrap_or_default();
        let size = device.saturating_sub(self.header());
        let takes = Bytes::new(pmem::charged(present)).unwrap_or_default();
        let takes = takes.saturating_sub(self.header());
        let counted = if self.pmem.semantics == v1::SizeSemantics::Charged { takes } else { size };
        let Range { required, limit } = self.range;
        if counted < required || !(Range { required: Bytes::ZERO, limit }).has(takes) {
            let asked = format!("required_bytes {required}, limit_bytes {limit}");
            return Err(Error::exists(it, "capacity_bytes", takes, asked));
        }
        if self.pmem.is_direct {
            let asked = self.pmem.request(Bytes::ZERO).usage();
            let shown = |usage: v1::PmemUsage| format!("{usage:?}");
            if present.usage() != asked {
                return Err(Error::exists(it, "usage", shown(present.usage()), shown(asked)));
            }
        }
        if !source.is_of(present) {
            let existing = if present.origin.is_empty() { "another one" } else { &present.origin };
            return Err(Error::exists(it, "volume_content_source", existing, source.shown()));
        }
        Ok(device)
    }

    /// Bytes of its device before its data.
    fn header(&self) -> Bytes {
        if self.parameters.encrypted { sizes::LUKS_HEADER } else { Bytes::ZERO }
    }

    /// Bytes that its device may have at the most; 0: any.
    pub(super) fn device_limit(&self) -> Bytes {
        let limit = self.range.limit;
        if limit.is_zero() { limit } else { limit.saturating_add(self.header()) }
    }

    /// The size of the device of a volume that is to be made.
    pub(super) fn size(
        &self,
        plugin: &Plugin,
        pool: &v1::Pool,
        source: &Source,
    ) -> Result<Bytes, Error> {
        sizes::with_header(self.visible_size(plugin, pool, source)?, self.header())
    }

    fn visible_size(
        &self,
        plugin: &Plugin,
        pool: &v1::Pool,
        source: &Source,
    ) -> Result<Bytes, Error> {
        let config = &plugin.settings.config;
        let Some(origin) = source.volume() else {
            let smallest = |one: &Capability| {
                let fs = self.fs(one);
                self.pmem.minimum(pool, config.minimum.of(fs), fs)
            };
            let rules = Rules {
                default: config.default_size,
                minimum: self.capabilities.iter().map(smallest).max().unwrap_or_default(),
                granule: self.granule(pool),
            };
            let size = self.range.choose(&rules)?;
            // The charged size is a multiple of the step, including the overhead.
            let step = pmem::step(pool);
            let takes = if self.pmem.is_direct { size.round_up(step) } else { Some(size) };
            let limit = self.range.limit;
            if !limit.is_zero() && takes.is_none_or(|takes| takes > limit) {
                let allowed = format!("no less than a multiple of {step} that holds {size}");
                return Err(Error::out_of_range("capacity_range.limit_bytes", limit, allowed));
            }
            return Ok(size);
        };
        // The source already has its file system, so that no minimum size applies.
        let smallest = Bytes::new(origin.size_bytes).unwrap_or_default();
        let smallest = smallest.saturating_sub(self.header());
        let Range { required, limit } = self.range;
        let (field, wanted) = if !required.is_zero() && required < smallest {
            ("required_bytes", required)
        } else if !limit.is_zero() && limit < smallest {
            ("limit_bytes", limit)
        } else {
            let block = Bytes::constant(i64::from(origin.block_size));
            let granule = block.max(self.granule(pool));
            return self.range.choose(&Rules { default: smallest, minimum: smallest, granule });
        };
        let allowed = format!("at least the size of its source ({smallest})");
        Err(Error::out_of_range(format_args!("capacity_range.{field}"), wanted, allowed))
    }

    /// The step of sizes.
    fn granule(&self, pool: &v1::Pool) -> Bytes {
        let granule = self.pmem.granule(pool, room::granule(pool, &self.class));
        if self.parameters.encrypted { granule.max(sizes::LUKS_GRANULE) } else { granule }
    }

    /// The file system of a capability; `None` for a block device.
    fn fs(&self, capability: &Capability) -> Option<FileSystem> {
        if capability.is_block() {
            return None;
        }
        let given = capability.file_system().or(self.parameters.file_system);
        Some(given.unwrap_or(FileSystem::Ext4))
    }

    /// The volume context: facts that the node cannot determine itself.
    fn context(
        &self,
        plugin: &Plugin,
        pool: &v1::Pool,
        volume: &v1::Volume,
    ) -> HashMap<String, String> {
        let keys = &plugin.settings.keys;
        let mut context = self.context_of_fs(plugin);
        let of_pmem = self.pmem.context(pool, volume).into_iter();
        context.extend(of_pmem.map(|(word, value)| (keys.of_context(word), value)));
        context
    }

    /// The part of it that says how the content is made.
    pub(super) fn context_of_fs(&self, plugin: &Plugin) -> HashMap<String, String> {
        let keys = &plugin.settings.keys;
        let mut context = HashMap::new();
        if let Some(options) = &self.parameters.mkfs_options {
            context.insert(keys.mkfs_options(), options.clone());
        }
        if self.parameters.encrypted {
            context.insert(keys.encryption(), blockd_luks::KIND.to_owned());
        }
        let unnamed = |one: &Capability| !one.is_block() && one.file_system().is_none();
        if let Some(file_system) = self.parameters.file_system
            && self.capabilities.iter().any(unnamed)
        {
            context.insert(keys.fs_type(), file_system.name().to_owned());
        }
        context
    }
}

/// The class that a request names. Volumes of a volume group are thin, and in no class of the
/// configuration.
pub(super) fn class_of(plugin: &Plugin, parameters: &ClassParameters) -> Result<Class, Error> {
    let settings = &plugin.settings;
    if let Some(group) = &parameters.volume_group {
        return Ok(Class { is_default: false, ..Class::usual(group) });
    }
    let name = parameters.device_class.as_deref();
    settings.config.class(&settings.keys.device_class(), name).cloned()
}

/// The pool of a volume's source, by its id.
fn source_pool(plugin: &Plugin, content: &proto::VolumeContentSource) -> Option<String> {
    let names = &plugin.settings.names;
    match content.r#type.as_ref()? {
        Type::Snapshot(of) => names.parse_snapshot(&of.snapshot_id).map(|id| id.pool),
        Type::Volume(of) => names.parse_volume(&of.volume_id).map(|id| id.pool),
    }
}

impl Source {
    async fn find(plugin: &Plugin, pools: &Pools, asked: &Asked) -> Result<Self, Error> {
        let names = &plugin.settings.names;
        let Some(content) = &asked.content else { return Ok(Self::Nothing) };
        let field = "volume_content_source";
        match content.r#type.as_ref().ok_or_else(|| Error::missing(field))? {
            Type::Snapshot(SnapshotSource { snapshot_id }) => {
                limits::required(&format!("{field}.snapshot.snapshot_id"), snapshot_id)?;
                let id = names.parse_snapshot(snapshot_id).filter(|id| pools.has(&id.pool));
                let id = id.ok_or_else(|| Error::not_found("snapshot", snapshot_id))?;
                let found = plugin.daemon.find_volume(&id.pool, &id.name).await?;
                let found = found.filter(|one| one.kind() == v1::VolumeKind::Snapshot);
                Ok(Self::Snapshot(id, found))
            }
            Type::Volume(VolumeSource { volume_id }) => {
                limits::required(&format!("{field}.volume.volume_id"), volume_id)?;
                if let Some(id) = plugin.settings.cells.parse(volume_id) {
                    return Err(cells::refuse_family(&id, "clones"));
                }
                let id = names.parse_volume(volume_id).filter(|id| pools.has(&id.pool));
                let id = id.ok_or_else(|| Error::not_found("volume", volume_id))?;
                let found = plugin.daemon.find_volume(&id.pool, &id.name).await?;
                let found = found.filter(|one| one.kind() == v1::VolumeKind::Volume);
                Ok(Self::Volume(id, found))
            }
        }
    }

    /// The source volume, if there is one and it still exists.
    const fn volume(&self) -> Option<&v1::Volume> {
        match self {
            Self::Nothing => None,
            Self::Snapshot(_, found) | Self::Volume(_, found) => found.as_ref(),
        }
    }

    fn shown(&self) -> String {
        match self {
            Self::Nothing => "nothing".to_owned(),
            Self::Snapshot(id, _) => id.to_string(),
            Self::Volume(id, _) => id.to_string(),
        }
    }

    /// Whether an existing volume was made from this source. The source of the existing volume may
    /// be deleted by now; then it counts as the requested one, unless the requested one still
    /// exists.
    fn is_of(&self, present: &v1::Volume) -> bool {
        let has_origin = present.origin_id != 0;
        match self {
            Self::Nothing => !has_origin,
            Self::Snapshot(_, Some(snapshot)) => present.origin_id == snapshot.id,
            Self::Snapshot(_, None) => has_origin && present.origin.is_empty(),
            // The snapshot in between is gone, or about to go; those of users are others.
            Self::Volume(id, found) => {
                let is_family = |one: &v1::Volume| one.family_id == present.family_id;
                let between = present.origin.strip_prefix(&id.name);
                has_origin
                    && found.as_ref().is_none_or(is_family)
                    && (present.origin.is_empty()
                        || between.is_some_and(|rest| rest.starts_with("@~clone-")))
            }
        }
    }

    /// Refuses requests that cannot be created.
    fn check_new(&self, pool: &v1::Pool) -> Result<(), Error> {
        let (what, of_pool, found) = match self {
            Self::Nothing => return Ok(()),
            Self::Snapshot(id, found) => ("snapshot", &id.pool, found),
            Self::Volume(id, found) => ("volume", &id.pool, found),
        };
        if found.is_none() {
            return Err(Error::not_found(what, self.shown()));
        }
        if *of_pool != pool.name {
            let allowed = format!("of pool {}, which the class is of", pool.name);
            return Err(Error::invalid("volume_content_source", self.shown(), allowed));
        }
        Ok(())
    }

    /// Refuses a source of the other kind: a clone has the header and the key of its source, or
    /// none of both.
    fn check_encryption(&self, plugin: &Plugin, asked: &Asked) -> Result<(), Error> {
        let is_of_kind =
            |source: &v1::Volume| plugin.header(source).is_zero() != asked.parameters.encrypted;
        if self.volume().is_none_or(is_of_kind) {
            return Ok(());
        }
        let allowed = if asked.parameters.encrypted {
            "encrypted, as the class has encryption: luks2, which an existing volume can't be given"
        } else {
            "not encrypted, or of a class with encryption: luks2, since it stays encrypted"
        };
        Err(Error::invalid("volume_content_source", self.shown(), allowed))
    }

    async fn make(
        &self,
        plugin: &Plugin,
        id: &VolumeId,
        spec: &CreateSpec<'_>,
    ) -> Result<v1::Volume, Error> {
        let source = match self {
            Self::Nothing => return provision::create(plugin, spec).await,
            Self::Snapshot(snapshot, _) => {
                return provision::clone(plugin, spec, &snapshot.name).await;
            }
            Self::Volume(source, _) => source,
        };
        let _clones = plugin.clones.read().await;
        let snapshot = plugin.settings.names.clone_snapshot(source, id);
        let member = v1::SnapshotMember { volume: source.name.clone(), name: snapshot.clone() };
        let asked = v1::CreateSnapshotsRequest {
            pool: id.pool.clone(),
            members: vec![member],
            ..Default::default()
        };
        plugin.daemon.create_snapshots(asked).await?;
        let made = provision::clone(plugin, spec, &snapshot).await;
        match made {
            Ok(volume) => {
                self.forget(plugin, id).await?;
                Ok(volume)
            }
            Err(error) => {
                provision::remove(plugin, &id.pool, &snapshot).await;
                Err(error)
            }
        }
    }

    /// Deletes the snapshot that was in between. If the daemon refuses that, the volume is there
    /// nevertheless, and the snapshot goes with the next that is looked for.
    async fn forget(&self, plugin: &Plugin, id: &VolumeId) -> Result<(), Error> {
        let Self::Volume(source, _) = self else { return Ok(()) };
        let name = plugin.settings.names.clone_snapshot(source, id);
        let asked = v1::DeleteVolumeRequest {
            name,
            pool: id.pool.clone(),
            force: false,
            ..Default::default()
        };
        match plugin.daemon.delete_volume(asked).await {
            Err(error @ Error::Daemon(_)) => {
                tracing::warn!(volume = %id, %error, "the snapshot that it was cloned from stays");
                Ok(())
            }
            other => other.map(|_| ()),
        }
    }
}
