//! Parameters of persistent memory in storage classes and inline volumes, and their valid
//! combinations.
//!
//! A device of ublk has no DAX, so that applications map memory only with the kernel's own device.
//! The same is true of images for virtual machines: on a device of ublk, stores of a virtual
//! machine would reach only the host's page cache, and a flush in the virtual machine would not
//! write them back. Impossible requests are refused, never downgraded.

use blockd_api::v1;
use blockd_csi_base::bytes::Bytes;

use crate::capability::{Capability, FileSystem};
use crate::config::{Class, Kind};
use crate::error::Error;

/// Keys of parameters, with and without the driver's name before them: storage classes of other
/// drivers have them without.
pub const KEYS: &str = "usage, eraseAfter, kataContainers, sizeSemantics";

/// Words of a volume's context that the node reads.
pub const USAGE: &str = "usage";
pub const KATA: &str = "kata-containers";
pub const KATA_PARTITION: &str = "kata-partition";

/// The smallest xfs that is laid out in pages of 2 MiB: its log must fit into a quarter of it, and
/// mkfs makes none below 64 MiB for such a layout.
const MAPPED_XFS: Bytes = Bytes::constant(576 * 1_048_576);

/// The overhead of a volume with an image for virtual machines beyond the smallest size of a file
/// system: another file system around it, with its journal, and the image's own front.
const AROUND_IMAGE: Bytes = Bytes::constant(64 * 1_048_576);

/// The usage of a volume.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Usage {
    /// Applications map it.
    AppDirect,
    /// The device is read and written in sectors that do not tear.
    FileIo,
}

impl Usage {
    /// Returns the value in parameters.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::AppDirect => "AppDirect",
            Self::FileIo => "FileIO",
        }
    }

    /// Reads a parameter.
    ///
    /// # Errors
    /// The value is invalid. The error names `field`.
    pub fn parse(field: &str, text: &str) -> Result<Self, Error> {
        let known = [Self::AppDirect, Self::FileIo].into_iter().find(|one| one.name() == text);
        known.ok_or_else(|| Error::invalid(field, text, "AppDirect or FileIO"))
    }
}

/// The parameters as given. `None`: not given.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Parameters {
    pub usage: Option<Usage>,
    pub erase_after: Option<bool>,
    pub kata: Option<bool>,
    pub semantics: Option<v1::SizeSemantics>,
}

impl Parameters {
    /// Takes a parameter, if it is one of these. `key` is without a driver's name, `field` its name
    /// in errors.
    ///
    /// # Errors
    /// Its value is not allowed, or it was there already.
    pub fn take(&mut self, field: &str, key: &str, value: &str) -> Result<bool, Error> {
        let was_there = match key {
            "usage" => self.usage.replace(Usage::parse(field, value)?).is_some(),
            "eraseAfter" | "eraseafter" => {
                self.erase_after.replace(boolean(field, value)?).is_some()
            }
            "kataContainers" => self.kata.replace(boolean(field, value)?).is_some(),
            "sizeSemantics" => {
                let semantics = match value {
                    "usable" => v1::SizeSemantics::Usable,
                    "charged" => v1::SizeSemantics::Charged,
                    _ => return Err(Error::invalid(field, value, "usable or charged")),
                };
                self.semantics.replace(semantics).is_some()
            }
            _ => return Ok(false),
        };
        if was_there {
            return Err(Error::invalid(field, value, "given once, in one spelling"));
        }
        Ok(true)
    }

    /// Derives the plan for volumes of a class. `prefix` precedes the names of fields in errors.
    ///
    /// # Errors
    /// INVALID_ARGUMENT: some of it does not go together, or not with the class.
    pub fn of_class(&self, prefix: &str, class: &Class) -> Result<Plan, Error> {
        let field = |key: &str| format!("{prefix}{key}");
        let kata = self.kata.unwrap_or_default();
        let Self { usage, erase_after, semantics, .. } = *self;
        if !class.kind.is_pmem() {
            let given = [
                usage.map(|usage| ("usage", usage.name())),
                semantics.map(|_| ("sizeSemantics", "given")),
                kata.then_some(("kataContainers", "true")),
            ];
            if let Some((key, value)) = given.into_iter().flatten().next() {
                let allowed = format!("left out: class {} is not in persistent memory", class.name);
                return Err(Error::invalid(field(key), value, allowed));
            }
            return Ok(Plan { erase_after, ..Plan::default() });
        }
        let is_direct = class.kind == Kind::PmemDirect;
        if kata && !is_direct {
            let allowed = format!(
                "false, or left out: an image is used as AppDirect, and volumes of class {} are \
                 devices of ublk, which have no DAX; use a class of kind pmem-direct",
                class.name
            );
            return Err(Error::invalid(field("kataContainers"), "true", allowed));
        }
        if kata && usage == Some(Usage::FileIo) {
            let allowed = "AppDirect, or left out: with kataContainers a virtual machine maps it";
            return Err(Error::invalid(field("usage"), "FileIO", allowed));
        }
        if !is_direct && usage == Some(Usage::AppDirect) {
            let allowed = format!(
                "FileIO, or left out: volumes of class {} are devices of ublk, which have no DAX; \
                 use a class of kind pmem-direct",
                class.name
            );
            return Err(Error::invalid(field("usage"), "AppDirect", allowed));
        }
        let usual = if is_direct { Usage::AppDirect } else { Usage::FileIo };
        Ok(Plan {
            usage: Some(usage.unwrap_or(usual)),
            erase_after,
            kata,
            kata_partition: kata && class.kata_partition,
            semantics: semantics.unwrap_or(v1::SizeSemantics::Usable),
            is_direct,
        })
    }
}

/// How a volume is made, as far as that is about persistent memory.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Plan {
    /// `None`: it is not in persistent memory.
    pub usage: Option<Usage>,
    /// `None`: as the daemon has it.
    pub erase_after: Option<bool>,
    /// Whether it holds an image that virtual machines see as a device of persistent memory.
    pub kata: bool,
    /// Whether virtual machines see a partition table.
    pub kata_partition: bool,
    /// Whether its size includes the overhead.
    pub semantics: v1::SizeSemantics,
    /// Whether the volume is a namespace of its own.
    pub is_direct: bool,
}

impl Plan {
    /// Whether it is mounted so that applications map memory.
    #[must_use]
    pub fn is_mapped(&self) -> bool {
        self.usage == Some(Usage::AppDirect)
    }

    /// Refuses ways of use that are impossible. `field` names the capability, `fs` is its file
    /// system.
    ///
    /// # Errors
    /// INVALID_ARGUMENT with the reason.
    pub fn check(
        &self,
        field: &str,
        one: &Capability,
        fs: Option<FileSystem>,
    ) -> Result<(), Error> {
        if self.kata && one.is_block() {
            let allowed = "mount: with kataContainers the device holds an image";
            return Err(Error::invalid(format_args!("{field}.access_type"), "block", allowed));
        }
        if self.is_mapped() && fs == Some(FileSystem::Btrfs) {
            let field = format!("{field}.mount.fs_type");
            return Err(Error::invalid(field, "btrfs", "ext4 or xfs: btrfs has no DAX"));
        }
        Ok(())
    }

    /// Converts it to the daemon's message.
    #[must_use]
    pub fn request(&self, limit: Bytes) -> v1::CreateVolumeRequest {
        let usage = match self.usage {
            None => v1::PmemUsage::Unspecified,
            Some(Usage::AppDirect) => v1::PmemUsage::AppDirect,
            Some(Usage::FileIo) => v1::PmemUsage::FileIo,
        };
        v1::CreateVolumeRequest {
            usage: usage.into(),
            erase_after: self.erase_after,
            limit_bytes: if self.is_direct { limit.get() } else { 0 },
            size_semantics: self.semantics.into(),
            ..Default::default()
        }
    }

    /// Returns the context of a volume: facts for the node, and information for users.
    #[must_use]
    pub fn context(&self, pool: &v1::Pool, volume: &v1::Volume) -> Vec<(&'static str, String)> {
        let Some(usage) = self.usage else { return Vec::new() };
        let mut context = vec![
            (USAGE, usage.name().to_owned()),
            ("usable-bytes", volume.size_bytes.to_string()),
            ("charged-bytes", charged(volume).to_string()),
            ("durability", durability(volume.durability()).to_owned()),
            ("erase-after", volume.erase_after.to_string()),
        ];
        if !pool.region.is_empty() {
            context.push(("region", pool.region.clone()));
        }
        if pool.numa_node >= 0 {
            context.push(("numa-node", pool.numa_node.to_string()));
        }
        if self.kata {
            context.push((KATA, "true".to_owned()));
        }
        if self.kata_partition {
            context.push((KATA_PARTITION, "true".to_owned()));
        }
        context
    }

    /// Returns the step of sizes in requests to a pool. The overhead of a namespace is added by the
    /// pool, which then rounds. `block` is the logical block.
    #[must_use]
    pub fn granule(&self, pool: &v1::Pool, block: Bytes) -> Bytes {
        let leaves_it = self.is_direct && self.semantics == v1::SizeSemantics::Usable;
        if self.usage.is_none() || leaves_it { block } else { block.max(step(pool)) }
    }

    /// The smallest volume, of those that its use allows.
    #[must_use]
    pub fn minimum(&self, pool: &v1::Pool, of_use: Bytes, fs: Option<FileSystem>) -> Bytes {
        if self.usage.is_none() {
            return of_use;
        }
        let of_pool = Bytes::new(pool.minimum_volume_bytes).unwrap_or_default();
        let of_use = match fs {
            // The pool's minimum is a usable device.
            None if !of_pool.is_zero() => Bytes::ZERO,
            Some(FileSystem::Xfs) if self.usage == Some(Usage::AppDirect) => of_use.max(MAPPED_XFS),
            _ => of_use,
        };
        let around = if self.kata { AROUND_IMAGE } else { Bytes::ZERO };
        of_pool.max(of_use.saturating_add(around))
    }
}

/// Returns the bytes that a volume takes of its pool, which is its claim's capacity: at least its
/// visible size.
#[must_use]
pub fn charged(volume: &v1::Volume) -> i64 {
    volume.charged_bytes.max(volume.size_bytes)
}

/// The step of sizes in a pool; 0 where it has none.
#[must_use]
pub fn step(pool: &v1::Pool) -> Bytes {
    Bytes::new(pool.volume_step_bytes).unwrap_or_default()
}

/// A boolean, as Go's `strconv.ParseBool` reads it: the default of storage classes.
///
/// # Errors
/// The value is invalid. The error names `field`.
pub fn boolean(field: &str, text: &str) -> Result<bool, Error> {
    match text {
        "1" | "t" | "T" | "TRUE" | "true" | "True" => Ok(true),
        "0" | "f" | "F" | "FALSE" | "false" | "False" => Ok(false),
        _ => {
            let allowed = "1, t, T, TRUE, true, True, 0, f, F, FALSE, false or False";
            Err(Error::invalid(field, text, allowed))
        }
    }
}

/// The name of a level, as users read it.
#[must_use]
pub const fn durability(level: v1::Durability) -> &'static str {
    match level {
        v1::Durability::Unspecified => "unknown",
        v1::Durability::PowerSafe => "power-safe",
        v1::Durability::RestartSafe => "restart-safe",
        v1::Durability::Volatile => "volatile",
    }
}

#[cfg(test)]
mod tests {
    use tonic::Code;

    use super::*;

    const BLOCK: Bytes = Bytes::constant(512);

    fn class(kind: Kind) -> Class {
        Class { kind, kata_partition: true, ..Class::usual("c") }
    }

    fn plan(kind: Kind, pairs: &[(&str, &str)]) -> Result<Plan, Error> {
        let mut parameters = Parameters::default();
        for (key, value) in pairs {
            assert!(parameters.take(key, key, value)?, "{key}");
        }
        parameters.of_class("", &class(kind))
    }

    /// Row: P25.
    #[test]
    fn booleans_are_those_of_strconv() {
        for text in ["1", "t", "T", "TRUE", "true", "True"] {
            assert!(boolean("b", text).unwrap(), "{text}");
        }
        for text in ["0", "f", "F", "FALSE", "false", "False"] {
            assert!(!boolean("b", text).unwrap(), "{text}");
        }
        for text in ["", "yes", "tRUE", "TrUe", "2", " true", "on", "FaLSE"] {
            let error = boolean("kataContainers", text).unwrap_err();
            assert_eq!(error.code(), Code::InvalidArgument);
            assert!(error.to_string().starts_with("kataContainers is "), "{error}");
        }
    }

    /// Row: P24.
    #[test]
    fn usage_has_to_fit_the_class() {
        let usage = |kind, pairs: &[_]| plan(kind, pairs).unwrap().usage;
        assert_eq!(usage(Kind::PmemDirect, &[]), Some(Usage::AppDirect));
        assert_eq!(usage(Kind::PmemDirect, &[("usage", "FileIO")]), Some(Usage::FileIo));
        assert_eq!(usage(Kind::PmemPooled, &[]), Some(Usage::FileIo));
        assert_eq!(usage(Kind::PmemPooled, &[("usage", "FileIO")]), Some(Usage::FileIo));
        assert_eq!(usage(Kind::Thin, &[]), None);
        for wrong in ["", "appdirect", "fileio", "Volatile"] {
            assert!(plan(Kind::PmemDirect, &[("usage", wrong)]).is_err(), "{wrong}");
        }
        // The error has the reason.
        let error = plan(Kind::PmemPooled, &[("usage", "AppDirect")]).unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument);
        assert!(error.to_string().contains("devices of ublk, which have no DAX"), "{error}");
        for kind in [Kind::Thin, Kind::Thick] {
            for pair in [
                ("usage", "FileIO"),
                ("usage", "AppDirect"),
                ("kataContainers", "1"),
                ("sizeSemantics", "usable"),
            ] {
                let error = plan(kind, &[pair]).unwrap_err();
                assert!(error.to_string().contains("not in persistent memory"), "{error}");
            }
            assert_eq!(plan(kind, &[("kataContainers", "F")]).unwrap(), Plan::default());
            let erased = plan(kind, &[("eraseAfter", "true")]).unwrap();
            assert_eq!(erased.request(Bytes::ZERO).erase_after, Some(true));
        }
    }

    /// Row: P29.
    #[test]
    fn kata_excludes_file_io_raw_block_and_btrfs() {
        let kind = Kind::PmemDirect;
        let error = plan(kind, &[("kataContainers", "T"), ("usage", "FileIO")]).unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument);
        assert!(error.to_string().starts_with("usage is FileIO"), "{error}");
        let with = plan(kind, &[("kataContainers", "T"), ("usage", "AppDirect")]).unwrap();
        assert_eq!(with, plan(kind, &[("kataContainers", "T")]).unwrap());
        assert!(with.kata && with.kata_partition);
        let access = crate::capability::Access::Block;
        let mode = crate::capability::Mode::Writer;
        let block = Capability { access, mode };
        let error = with.check("c", &block, None).unwrap_err();
        assert!(error.to_string().starts_with("c.access_type is block"), "{error}");
        let mount = crate::capability::Mount { file_system: None, flags: Vec::new() };
        let access = crate::capability::Access::Mount(mount);
        let mount = Capability { access, mode };
        assert!(with.check("c", &mount, Some(FileSystem::Btrfs)).is_err());
        assert!(with.check("c", &mount, Some(FileSystem::Xfs)).is_ok());
        for kind in [Kind::PmemPooled, Kind::PmemDirect] {
            let without = plan(kind, &[]).unwrap();
            assert!(without.check("c", &block, None).is_ok());
            let has_dax = kind == Kind::PmemDirect;
            let btrfs = without.check("c", &mount, Some(FileSystem::Btrfs));
            assert_eq!(btrfs.is_err(), has_dax);
        }
    }

    #[test]
    fn kata_image_in_a_pooled_class_is_refused_and_the_error_names_pmem_direct() {
        for more in [&[][..], &[("usage", "AppDirect")], &[("usage", "FileIO")]] {
            let pairs = [&[("kataContainers", "1")], more].concat();
            let error = plan(Kind::PmemPooled, &pairs).unwrap_err();
            assert_eq!(error.code(), Code::InvalidArgument, "{more:?}");
            let text = error.to_string();
            assert!(text.starts_with("kataContainers is true: must be false"), "{text}");
            assert!(text.contains("AppDirect") && text.contains("no DAX"), "{text}");
            assert!(text.ends_with("use a class of kind pmem-direct"), "{text}");
        }
        let without = plan(Kind::PmemPooled, &[("kataContainers", "false")]).unwrap();
        assert_eq!((without.usage, without.kata), (Some(Usage::FileIo), false));
    }

    /// Row: P45.
    #[test]
    fn a_key_has_two_spellings_and_one_value() {
        let erase = |pairs: &[_]| plan(Kind::PmemDirect, pairs).map(|plan| plan.erase_after);
        // Without a word it is as the daemon has it: erased.
        assert_eq!(erase(&[]).unwrap(), None);
        assert_eq!(erase(&[("eraseAfter", "false")]).unwrap(), Some(false));
        assert_eq!(erase(&[("eraseafter", "True")]).unwrap(), Some(true));
        let error = erase(&[("eraseAfter", "true"), ("eraseafter", "true")]).unwrap_err();
        assert!(error.to_string().contains("given once"), "{error}");
    }

    #[test]
    fn requests_to_the_daemon_match_the_class() {
        let limit = Bytes::constant(1 << 30);
        let asked = |kind, pairs: &[_]| {
            let asked = plan(kind, pairs).unwrap().request(limit);
            (asked.usage(), asked.limit_bytes, asked.size_semantics())
        };
        let (usable, charged) = (v1::SizeSemantics::Usable, v1::SizeSemantics::Charged);
        let (app, io) = (v1::PmemUsage::AppDirect, v1::PmemUsage::FileIo);
        assert_eq!(asked(Kind::PmemDirect, &[]), (app, 1 << 30, usable));
        let seed = [("sizeSemantics", "charged"), ("usage", "FileIO")];
        assert_eq!(asked(Kind::PmemDirect, &seed), (io, 1 << 30, charged));
        assert_eq!(asked(Kind::PmemPooled, &[]), (io, 0, usable));
        assert_eq!(asked(Kind::PmemDirect, &[("kataContainers", "1")]), (app, 1 << 30, usable));
        let of_others = Plan::default().request(limit);
        assert_eq!(of_others, v1::CreateVolumeRequest::default());
    }

    /// Rows: P14, P17.
    #[test]
    fn steps_and_smallest_sizes_are_the_pools_own() {
        let mib = |count: i64| Bytes::constant(count * 1_048_576);
        let pool = |step: i64| v1::Pool {
            volume_step_bytes: mib(step).get(),
            minimum_volume_bytes: mib(step).get(),
            ..Default::default()
        };
        let of = |kind, pairs: &[_], step| plan(kind, pairs).unwrap().granule(&pool(step), BLOCK);
        assert_eq!(of(Kind::PmemPooled, &[], 4), mib(4));
        // Two sets of a gibibyte each.
        let charged = [("sizeSemantics", "charged")];
        assert_eq!(of(Kind::PmemDirect, &charged, 2048), mib(2048));
        assert_eq!(of(Kind::PmemDirect, &[], 2048), BLOCK);
        assert_eq!(of(Kind::Thin, &[], 4), BLOCK);
        let least = |kind, pairs: &[_], is_block: bool| {
            let plan = plan(kind, pairs).unwrap();
            let fs = (!is_block).then_some(FileSystem::Ext4);
            plan.minimum(&pool(4), mib(if is_block { 8 } else { 32 }), fs)
        };
        assert_eq!(least(Kind::PmemPooled, &[], true), mib(4));
        assert_eq!(least(Kind::PmemPooled, &[], false), mib(32));
        assert_eq!(least(Kind::PmemDirect, &[("kataContainers", "1")], false), mib(96));
        assert_eq!(least(Kind::Thick, &[], true), mib(8));
    }
}
