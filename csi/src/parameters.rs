//! Parameters of storage classes and of volume attributes classes, and the part that is passed to
//! the node. Unknown parameters are refused by name.

use std::collections::HashMap;

use blockd_api::v1;
use blockd_csi_base::bytes::Bytes;
use blockd_csi_base::quantity;

use crate::capability::{Capability, FileSystem, Mode, Reach};
use crate::cells;
use crate::error::Error;
use crate::limits;
use crate::placement::Placement;
use crate::pmem;

/// Prefix of parameters that the sidecars of Kubernetes add: the file system's type, names of
/// claims and the like.
const SIDECARS: &str = "csi.storage.k8s.io/";

/// The same, of older sidecars.
const PROVISIONER: &str = "storage.kubernetes.io/";

/// The file system's type, in a storage class.
pub const FS_TYPE: &str = "csi.storage.k8s.io/fstype";

/// The kind of encryption. Like the parameters of persistent memory it may do without the driver's
/// name.
const ENCRYPTION: &str = "encryption";

/// The volume group of a class whose volumes several nodes reach, and how these are attached. Both
/// may do without the driver's name.
const VOLUME_GROUP: &str = "volume-group";
const FRONT_END: &str = "front-end";

/// Words of options for mkfs: the general limit on strings leaves room for no more.
const MAX_MKFS_WORDS: usize = 64;

/// The longest time that a write can be made to wait, beyond which it may as well wait for ever: a
/// day.
const MAX_ON_FULL_MS: u64 = 86_400_000;

/// The keys of one driver: all begin with its name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Keys {
    driver: String,
}

/// The parameters of a storage class.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct ClassParameters {
    /// The device class; `None`: the default one.
    pub device_class: Option<String>,
    /// Options for mkfs, as they are written.
    pub mkfs_options: Option<String>,
    /// The file system, where a capability names none.
    pub file_system: Option<FileSystem>,
    /// The mutable parameters in the class.
    pub mutable: Mutable,
    /// The parameters of persistent memory.
    pub pmem: pmem::Parameters,
    /// Whether its volumes are encrypted.
    pub encrypted: bool,
    /// The volume group in which each volume has a cell of its own; `None`: volumes are in a pool.
    pub volume_group: Option<String>,
    /// How volumes of a group are attached; `None`: as block devices.
    pub front_end: Option<v1::FrontEnd>,
}

impl ClassParameters {
    /// Which nodes reach its volumes.
    #[must_use]
    pub const fn reach(&self) -> Reach {
        if self.volume_group.is_some() { Reach::Group } else { Reach::Node }
    }

    /// Takes a parameter, if it is about a volume group. `key` is without a driver's name.
    fn take_group(&mut self, field: &str, key: &str, value: &str) -> Result<bool, Error> {
        let was_there = match key {
            VOLUME_GROUP => {
                cells::check_group(field, value)?;
                self.volume_group.replace(value.to_owned()).is_some()
            }
            FRONT_END => self.front_end.replace(front_end(field, value)?).is_some(),
            _ => return Ok(false),
        };
        if was_there {
            return Err(Error::invalid(field, value, "given once, in one spelling"));
        }
        Ok(true)
    }

    /// Refuses parameters that do not go with a volume group, or not without one.
    ///
    /// # Errors
    /// INVALID_ARGUMENT.
    fn check_group(&self, keys: &Keys) -> Result<(), Error> {
        if self.volume_group.is_none() {
            let Some(front_end) = self.front_end else { return Ok(()) };
            let value = front_end.word().unwrap_or_default();
            return Err(Error::invalid(FRONT_END, value, "left out without volume-group"));
        }
        let pmem = &self.pmem;
        let of_node = "its volumes are in no pool of a node";
        let given = [
            (self.device_class.is_some(), keys.device_class(), of_node),
            (pmem.usage.is_some(), "usage".to_owned(), of_node),
            (pmem.erase_after.is_some(), "eraseAfter".to_owned(), of_node),
            (pmem.kata.is_some(), "kataContainers".to_owned(), of_node),
            (pmem.semantics.is_some(), "sizeSemantics".to_owned(), of_node),
        ];
        if let Some((_, key, why)) = given.into_iter().find(|(is_given, ..)| *is_given) {
            return Err(Error::invalid(key, "given", format!("left out with volume-group: {why}")));
        }
        self.mutable.check_group(keys)
    }

    /// Refuses uses that a volume of a group can't have. `field` names the capability.
    ///
    /// # Errors
    /// INVALID_ARGUMENT.
    pub fn check_use(&self, field: &str, one: &Capability) -> Result<(), Error> {
        if self.front_end == Some(v1::FrontEnd::Nbd) && !one.is_block() {
            let allowed = "block with front-end: nbd, which makes no device to mount";
            return Err(Error::invalid(format_args!("{field}.access_type"), "mount", allowed));
        }
        if self.encrypted && (one.mode == Mode::ManyNodes || self.front_end.is_some()) {
            let allowed = "left out with MULTI_NODE_MULTI_WRITER and with front-end: opening an \
                           encrypted device reads it, which would fetch its cell";
            return Err(Error::invalid(ENCRYPTION, blockd_luks::KIND, allowed));
        }
        Ok(())
    }

    /// Refuses encryption of volumes that applications or virtual machines map.
    ///
    /// # Errors
    /// INVALID_ARGUMENT.
    pub fn check_encryption(&self, plan: &pmem::Plan) -> Result<(), Error> {
        if !self.encrypted || !(plan.is_direct || plan.kata) {
            return Ok(());
        }
        let allowed = "left out in classes of kind pmem-direct and with kataContainers, whose \
                       volumes are mapped as they are";
        Err(Error::invalid(ENCRYPTION, blockd_luks::KIND, allowed))
    }
}

/// Parameters that can be changed while a volume exists. `None`: unchanged.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Mutable {
    /// Requests a second; 0: no limit.
    pub iops: Option<u64>,
    /// Bytes a second; 0: no limit.
    pub bandwidth: Option<Bytes>,
    /// The behaviour of writes when the pool is full, and the milliseconds of a timeout.
    pub on_full: Option<(v1::OnFull, u32)>,
    /// Bytes set aside; 0: none.
    pub reservation: Option<Bytes>,
    /// Bytes that it may have at the most; 0: no limit.
    pub quota: Option<Bytes>,
    /// The devices of its next extents.
    pub placement: Option<Placement>,
}

impl Mutable {
    /// Whether it says nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Merges two sets: the values of `other`, and those of `self` where `other` has none.
    #[must_use]
    pub fn under(self, other: Self) -> Self {
        Self {
            iops: other.iops.or(self.iops),
            bandwidth: other.bandwidth.or(self.bandwidth),
            on_full: other.on_full.or(self.on_full),
            reservation: other.reservation.or(self.reservation),
            quota: other.quota.or(self.quota),
            placement: other.placement.or(self.placement),
        }
    }

    /// Refuses parameters that a volume in a cell can't have.
    ///
    /// # Errors
    /// INVALID_ARGUMENT.
    pub fn check_group(&self, keys: &Keys) -> Result<(), Error> {
        let given = [
            (self.reservation.is_some(), "reservation", "a cell grows as its volume is written"),
            (self.placement.is_some(), "placement", "a cell has one device"),
        ];
        let Some((_, word, why)) = given.into_iter().find(|(is_given, ..)| *is_given) else {
            return Ok(());
        };
        let allowed = format!("left out for volumes of a volume group: {why}");
        Err(Error::invalid(keys.of_context(word), "given", allowed))
    }

    /// Converts the parameters to the daemon's settings of a volume.
    #[must_use]
    pub fn request(&self, pool: &str, name: &str) -> v1::ConfigureVolumeRequest {
        let (on_full, on_full_timeout_ms) = self.on_full.unwrap_or_default();
        let mut request = v1::ConfigureVolumeRequest {
            name: name.to_owned(),
            pool: pool.to_owned(),
            on_full: on_full.into(),
            on_full_timeout_ms,
            thick: None,
            reservation_bytes: self.reservation.map(Bytes::get),
            quota_bytes: self.quota.map(Bytes::get),
            iops: self.iops,
            bandwidth_bytes: self.bandwidth.map(Bytes::get),
            ..v1::ConfigureVolumeRequest::default()
        };
        if let Some(placement) = &self.placement {
            placement.apply(&mut request);
        }
        request
    }
}

impl Keys {
    /// Returns the keys of the driver of that name.
    #[must_use]
    pub fn new(driver: &str) -> Self {
        Self { driver: driver.to_owned() }
    }

    /// The key of the device class.
    #[must_use]
    pub fn device_class(&self) -> String {
        format!("{}/device-class", self.driver)
    }

    /// The key of options for mkfs; in the volume's context too.
    #[must_use]
    pub fn mkfs_options(&self) -> String {
        format!("{}/mkfs-options", self.driver)
    }

    /// The key of the file system in the volume's context, where only the class names it.
    #[must_use]
    pub fn fs_type(&self) -> String {
        format!("{}/fstype", self.driver)
    }

    /// The key of the kind of encryption, in the volume's context and its labels.
    #[must_use]
    pub fn encryption(&self) -> String {
        format!("{}/encryption", self.driver)
    }

    /// The key of the volume group of a volume's label.
    #[must_use]
    pub fn volume_group(&self) -> String {
        self.of_context(VOLUME_GROUP)
    }

    /// The key of the label with the name that a volume in a cell was made with.
    #[must_use]
    pub fn volume_name(&self) -> String {
        self.of_context("volume-name")
    }

    /// The key of the label that marks a volume in a cell while its device is being formatted. It
    /// has to be stored, and the prefix of a label has no capital letters.
    #[must_use]
    pub fn unfinished(&self) -> String {
        format!("{}/unfinished", self.driver.to_ascii_lowercase())
    }

    /// The key of the front end in the volume's context.
    #[must_use]
    pub fn front_end(&self) -> String {
        self.of_context(FRONT_END)
    }

    /// A key of the volume's context, by its last word.
    #[must_use]
    pub fn of_context(&self, word: &str) -> String {
        format!("{}/{word}", self.driver)
    }

    /// Reads the parameters of a storage class. `field` names the map in errors.
    ///
    /// # Errors
    /// The map is too long, a key is unknown, or a value is not allowed.
    pub fn class(
        &self,
        field: &str,
        map: &HashMap<String, String>,
    ) -> Result<ClassParameters, Error> {
        limits::map(field, map)?;
        let mut class = ClassParameters::default();
        let mut mutable = HashMap::new();
        let also = format!(
            "device-class, encryption, front-end, mkfs-options, volume-group, {}, ",
            pmem::KEYS
        );
        for (key, value) in map {
            if class.pmem.take(key, self.own(key).unwrap_or(key), value)? {
                continue;
            }
            if self.own(key).unwrap_or(key) == ENCRYPTION {
                encryption(key, value)?;
                class.encrypted = true;
                continue;
            }
            if class.take_group(key, self.own(key).unwrap_or(key), value)? {
                continue;
            }
            match self.own(key) {
                Some("device-class") => class.device_class = Some(value.clone()),
                Some("mkfs-options") => {
                    mkfs_options(key, value)?;
                    class.mkfs_options = Some(value.clone());
                }
                Some(_) => {
                    mutable.insert(key.clone(), value.clone());
                }
                None if key == FS_TYPE => class.file_system = file_system(key, value)?,
                None if is_of_sidecars(key) => {}
                None => return Err(self.unknown(field, key, &also)),
            }
        }
        class.mutable = self.read_mutable(field, &mutable, &also)?;
        class.check_group(self)?;
        Ok(class)
    }

    /// Reads parameters that can be changed. `field` names the map in errors.
    ///
    /// # Errors
    /// The map is too long, a key is unknown, or a value is not allowed.
    pub fn mutable(&self, field: &str, map: &HashMap<String, String>) -> Result<Mutable, Error> {
        limits::map(field, map)?;
        self.read_mutable(field, map, "")
    }

    fn read_mutable(
        &self,
        field: &str,
        map: &HashMap<String, String>,
        also: &str,
    ) -> Result<Mutable, Error> {
        let mut mutable = Mutable::default();
        let mut timeout = None;
        for (key, value) in map {
            match self.own(key) {
                Some("iops") => mutable.iops = Some(count(key, value)?),
                Some("bandwidth") => mutable.bandwidth = Some(quantity::size(key, value)?),
                Some("reservation") => mutable.reservation = Some(quantity::size(key, value)?),
                Some("quota") => mutable.quota = Some(quantity::size(key, value)?),
                Some("placement") => mutable.placement = Some(Placement::parse(key, value)?),
                Some("on-full") => mutable.on_full = Some((on_full(key, value)?, 0)),
                Some("on-full-timeout") => timeout = Some((key, milliseconds(key, value)?)),
                _ => return Err(self.unknown(field, key, also)),
            }
        }
        match (&mut mutable.on_full, timeout) {
            (Some((v1::OnFull::Timeout, given)), Some((_, milliseconds))) => *given = milliseconds,
            (Some((v1::OnFull::Timeout, _)), None) => {
                return Err(Error::missing(format_args!("{}/on-full-timeout", self.driver)));
            }
            (_, Some((key, milliseconds))) => {
                let value = format!("{milliseconds} ms");
                let allowed = format!("left out unless {}/on-full is timeout", self.driver);
                return Err(Error::invalid(key, value, allowed));
            }
            (_, None) => {}
        }
        Ok(mutable)
    }

    /// The rest of a key that is the driver's own.
    fn own<'a>(&self, key: &'a str) -> Option<&'a str> {
        key.strip_prefix(&self.driver)?.strip_prefix('/')
    }

    fn unknown(&self, field: &str, key: &str, also: &str) -> Error {
        let allowed = format!(
            "one of {also}iops, bandwidth, on-full, on-full-timeout, placement, reservation, \
             quota, each after {}/",
            self.driver
        );
        Error::invalid(format_args!("a key of {field}"), key, allowed)
    }
}

/// Whether a key is one that sidecars or the kubelet add, and that means nothing to us.
#[must_use]
pub fn is_of_sidecars(key: &str) -> bool {
    key.starts_with(SIDECARS) || key.starts_with(PROVISIONER)
}

/// The file system of that name; `None` for nothing.
///
/// # Errors
/// The value is not supported. The error names `field`.
pub fn file_system(field: &str, name: &str) -> Result<Option<FileSystem>, Error> {
    if name.is_empty() {
        return Ok(None);
    }
    let known = FileSystem::of_name(name);
    known.map(Some).ok_or_else(|| Error::invalid(field, name, "ext4, xfs or btrfs"))
}

/// A front end by its name.
///
/// # Errors
/// There is none of that name. The error names `field`.
pub fn front_end(field: &str, name: &str) -> Result<v1::FrontEnd, Error> {
    match name {
        "ublk" => Ok(v1::FrontEnd::Ublk),
        "nbd" => Ok(v1::FrontEnd::Nbd),
        other => Err(Error::invalid(field, other, "ublk or nbd")),
    }
}

/// The kind of encryption, of which there is one.
///
/// # Errors
/// The value is another one. The error names `field`.
pub fn encryption(field: &str, kind: &str) -> Result<(), Error> {
    if kind == blockd_luks::KIND {
        return Ok(());
    }
    Err(Error::invalid(field, kind, format!("{}, or left out", blockd_luks::KIND)))
}

/// Options for mkfs, word by word.
///
/// # Errors
/// The options are too long, or could name a file. `field` is what the error names.
pub fn mkfs_options(field: &str, text: &str) -> Result<Vec<String>, Error> {
    limits::string(field, text)?;
    let words: Vec<String> = text.split_ascii_whitespace().map(str::to_owned).collect();
    let is_fine = |word: &String| {
        let printable = word.bytes().all(|byte| byte.is_ascii_graphic());
        printable && !word.contains('/') && word != "--"
    };
    if words.len() > MAX_MKFS_WORDS || !words.iter().all(is_fine) {
        let allowed = "words of printable characters, without \"/\": no options that name files";
        return Err(Error::invalid(field, text, allowed));
    }
    Ok(words)
}

fn count(field: &str, text: &str) -> Result<u64, Error> {
    // The daemon accepts values beyond any device; the range of `i64` is enough.
    let fits = text.parse().ok().filter(|count: &u64| i64::try_from(*count).is_ok());
    let digits = text.bytes().all(|byte| byte.is_ascii_digit());
    fits.filter(|_| digits).ok_or_else(|| Error::invalid(field, text, "a whole number"))
}

fn on_full(field: &str, text: &str) -> Result<v1::OnFull, Error> {
    match text {
        "block" => Ok(v1::OnFull::Block),
        "timeout" => Ok(v1::OnFull::Timeout),
        "error" => Ok(v1::OnFull::Error),
        other => Err(Error::invalid(field, other, "block, timeout or error")),
    }
}

/// Reads `30s`, `500ms`, `5m`, `1h`, or whole seconds.
fn milliseconds(field: &str, text: &str) -> Result<u32, Error> {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(end);
    let unit = match unit {
        "ms" => Some(1),
        "" | "s" => Some(1000),
        "m" => Some(60_000),
        "h" => Some(3_600_000),
        _ => None,
    };
    let count: Option<u64> = digits.parse().ok();
    let milliseconds = count.zip(unit).and_then(|(count, unit)| count.checked_mul(unit));
    let fits = milliseconds.filter(|ms| (1..=MAX_ON_FULL_MS).contains(ms));
    fits.and_then(|ms| u32::try_from(ms).ok()).ok_or_else(|| {
        Error::invalid(field, text, "a time from 1ms to 24h, like 500ms, 30s, 5m or 1h")
    })
}

#[cfg(test)]
mod tests {
    use tonic::Code;

    use super::*;

    fn map(pairs: &[(&str, &str)]) -> HashMap<String, String> {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn a_storage_class_is_read() {
        let class = Keys::new("d").class(
            "parameters",
            &map(&[
                ("csi.storage.k8s.io/fstype", "xfs"),
                ("csi.storage.k8s.io/pvc/name", "claim"),
                ("d/device-class", "fast"),
                ("d/mkfs-options", "-m bigtime=1  -i size=512"),
                ("d/iops", "500"),
            ]),
        );
        let class = class.unwrap();
        assert_eq!(class.device_class.as_deref(), Some("fast"));
        assert_eq!(class.file_system, Some(FileSystem::Xfs));
        assert_eq!(class.mutable.iops, Some(500));
        let words = mkfs_options("m", class.mkfs_options.as_deref().unwrap()).unwrap();
        assert_eq!(words, ["-m", "bigtime=1", "-i", "size=512"]);
    }

    #[test]
    fn parameters_of_persistent_memory_are_read_with_and_without_the_drivers_name() {
        let keys = Keys::new("d");
        for prefix in ["", "d/"] {
            let key = |name: &str| format!("{prefix}{name}");
            let pairs = [
                (key("usage"), "AppDirect".to_owned()),
                (key("eraseafter"), "F".to_owned()),
                (key("kataContainers"), "t".to_owned()),
                (key("sizeSemantics"), "charged".to_owned()),
            ];
            let pmem = keys.class("p", &HashMap::from(pairs)).unwrap().pmem;
            let expected = pmem::Parameters {
                usage: Some(pmem::Usage::AppDirect),
                erase_after: Some(false),
                kata: Some(true),
                semantics: Some(v1::SizeSemantics::Charged),
            };
            assert_eq!(pmem, expected);
        }
        let both = map(&[("usage", "FileIO"), ("d/usage", "FileIO")]);
        assert!(keys.class("p", &both).unwrap_err().to_string().contains("given once"));
        for key in ["Usage", "erase_after", "katacontainers", "e/usage", "persistencyModel"] {
            let error = keys.class("p", &map(&[(key, "1")])).unwrap_err().to_string();
            assert!(error.contains("usage, eraseAfter, kataContainers"), "{error}");
        }
    }

    #[test]
    fn a_volume_group_is_read_and_refuses_what_does_not_go_with_it() {
        let keys = Keys::new("d");
        for prefix in ["", "d/"] {
            let (group, front_end) =
                (format!("{prefix}volume-group"), format!("{prefix}front-end"));
            let class = keys.class("p", &map(&[(&group, "san"), (&front_end, "nbd")])).unwrap();
            assert_eq!(class.volume_group.as_deref(), Some("san"));
            assert_eq!((class.front_end, class.reach()), (Some(v1::FrontEnd::Nbd), Reach::Group));
            for (key, value) in [
                ("d/device-class", "fast"),
                ("usage", "FileIO"),
                ("eraseAfter", "true"),
                ("kataContainers", "false"),
                ("sizeSemantics", "usable"),
                ("d/placement", "spread"),
                ("d/reservation", "1Gi"),
            ] {
                let error = keys.class("p", &map(&[(&group, "san"), (key, value)])).unwrap_err();
                assert_eq!(error.code(), Code::InvalidArgument);
                assert!(error.to_string().starts_with(&format!("{key} is given")), "{error}");
            }
        }
        for (key, value) in [("volume-group", ""), ("volume-group", "a+b"), ("front-end", "scsi")] {
            let error = keys.class("p", &map(&[(key, value)])).unwrap_err();
            assert!(error.to_string().starts_with(&format!("{key} is ")), "{error}");
        }
        let alone = keys.class("p", &map(&[("front-end", "nbd")])).unwrap_err();
        assert!(alone.to_string().contains("left out without volume-group"), "{alone}");
        let both = map(&[("volume-group", "a"), ("d/volume-group", "a")]);
        assert!(keys.class("p", &both).unwrap_err().to_string().contains("given once"));
        let usual = keys.class("p", &map(&[("d/iops", "5"), ("volume-group", "san")])).unwrap();
        assert_eq!((usual.mutable.iops, usual.front_end), (Some(5), None));
    }

    #[test]
    fn unknown_parameters_are_refused_by_name_in_both_maps() {
        let keys = Keys::new("d");
        for key in ["", "d", "d/", "d/IOPS", "e/iops", "iops", "fsType", "d/iops/x"] {
            for error in [
                keys.class("parameters", &map(&[(key, "1")])).unwrap_err(),
                keys.mutable("mutable_parameters", &map(&[(key, "1")])).unwrap_err(),
            ] {
                assert_eq!(error.code(), Code::InvalidArgument);
                let shown = if key.is_empty() { "empty" } else { key };
                assert!(error.to_string().contains(&format!("parameters is {shown}:")), "{error}");
            }
        }
        // Parameters that only a storage class has are not mutable.
        assert!(keys.mutable("m", &map(&[("usage", "FileIO")])).is_err());
        assert!(keys.mutable("m", &map(&[("d/device-class", "a")])).is_err());
        assert!(keys.mutable("m", &map(&[("csi.storage.k8s.io/pvc/name", "a")])).is_err());
    }

    #[test]
    fn mutable_parameters_match_the_daemons_settings() {
        let keys = Keys::new("d");
        let read = keys.mutable(
            "m",
            &map(&[
                ("d/iops", "0"),
                ("d/bandwidth", "100Mi"),
                ("d/reservation", "1Gi"),
                ("d/quota", "38797312"),
                ("d/on-full", "timeout"),
                ("d/on-full-timeout", "30s"),
                ("d/placement", "pin:/dev/sdc"),
            ]),
        );
        let request = read.unwrap().request("p", "v");
        assert_eq!((request.pool.as_str(), request.name.as_str()), ("p", "v"));
        assert_eq!((request.iops, request.bandwidth_bytes), (Some(0), Some(104_857_600)));
        assert_eq!(request.reservation_bytes, Some(1_073_741_824));
        assert_eq!(request.quota_bytes, Some(38_797_312));
        assert_eq!(request.on_full(), v1::OnFull::Timeout);
        assert_eq!((request.on_full_timeout_ms, request.thick), (30_000, None));
        assert_eq!(request.placement(), v1::Placement::Pin);
        assert_eq!(request.pin_to, "/dev/sdc");
        let nothing = keys.mutable("m", &map(&[])).unwrap();
        assert!(nothing.is_empty());
        assert_eq!(nothing.request("p", "v").on_full(), v1::OnFull::Unspecified);
    }

    #[test]
    fn wrong_values_are_refused_with_key_and_value() {
        let keys = Keys::new("d");
        for (key, value) in [
            ("d/iops", "-1"),
            ("d/iops", "+1"),
            ("d/iops", ""),
            ("d/iops", "9223372036854775808"),
            ("d/bandwidth", "fast"),
            ("d/quota", "-1"),
            ("d/reservation", "8Ei"),
            ("d/on-full", "wait"),
            ("d/placement", "pin:sdc"),
            ("d/on-full-timeout", "0"),
            ("d/on-full-timeout", "25h"),
            ("d/on-full-timeout", "30"),
        ] {
            let error = keys.mutable("m", &map(&[(key, value)])).unwrap_err();
            assert_eq!(error.code(), Code::InvalidArgument);
            assert!(error.to_string().starts_with(&format!("{key} is ")), "{error}");
        }
        let error = keys.mutable("m", &map(&[("d/on-full", "timeout")])).unwrap_err();
        assert_eq!(error.to_string(), "d/on-full-timeout is missing");
        for options in ["-d /etc", "/dev/sda", "--", "-L ä", &"-m ".repeat(50)] {
            let error = keys.class("p", &map(&[("d/mkfs-options", options)])).unwrap_err();
            assert!(error.to_string().starts_with("d/mkfs-options is "), "{error}");
        }
        let error = keys.class("p", &map(&[(FS_TYPE, "ntfs")])).unwrap_err();
        assert!(error.to_string().contains("fstype is ntfs"), "{error}");
    }

    #[test]
    fn mutable_parameters_go_before_those_of_the_class() {
        let keys = Keys::new("d");
        let class = keys.mutable("m", &map(&[("d/iops", "1"), ("d/quota", "2")])).unwrap();
        let later = keys.mutable("m", &map(&[("d/iops", "3")])).unwrap();
        let both = class.under(later);
        assert_eq!((both.iops, both.quota), (Some(3), Bytes::new(2)));
    }
}
