//! Assigns each cause to one side, by the table in `docs/KUBERNETES.md`: the controller reports
//! faults of pools, maps and the devices below them, the node those of devices, mounts and file
//! systems. Both may be called for one volume, and no fault may be reported twice.

use blockd_api::v1::{self, HealthCode};

use super::{Cause, Severity};

/// The side that reports a cause that the daemon has found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Side {
    /// ListVolumes and ControllerGetVolume.
    Controller,
    /// NodeGetVolumeStats, which requests it from the daemon.
    Node,
    /// NodeGetVolumeStats, which sees it for itself: the daemon's answer about it is not used.
    NodeAlone,
}

/// Returns the side that reports this code. Codes of a newer daemon belong to the controller.
#[must_use]
pub const fn side(code: HealthCode) -> Side {
    match code {
        HealthCode::PoolFailed
        | HealthCode::PoolReadOnly
        | HealthCode::DeviceGone
        | HealthCode::DeviceErrors
        | HealthCode::DeviceSlow
        | HealthCode::SpaceLow
        | HealthCode::SpaceVeryLow
        | HealthCode::SpaceFull
        | HealthCode::MetadataLow
        | HealthCode::WritesBlocked
        | HealthCode::IoErrors
        | HealthCode::QuotaFull
        | HealthCode::ProbeLate
        | HealthCode::Unspecified => Side::Controller,
        // Those that a volume's extents meet; of others it has nothing to fear.
        HealthCode::BadBlocks => Side::Node,
        HealthCode::DeviceNotServed | HealthCode::VolumeMissing => Side::NodeAlone,
    }
}

/// Returns the causes that one side reports.
#[must_use]
pub fn causes_for(wanted: Side, causes: &[v1::Cause]) -> Vec<Cause> {
    causes.iter().filter(|cause| side(cause.code()) == wanted).map(of_wire).collect()
}

fn of_wire(cause: &v1::Cause) -> Cause {
    let severity = match cause.severity() {
        v1::Severity::Warning => Severity::Warning,
        v1::Severity::Failure => Severity::Failure,
        v1::Severity::Unknown | v1::Severity::Unspecified => Severity::Unknown,
    };
    Cause { severity, message: cause.message.clone() }
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use super::*;

    fn all() -> impl Iterator<Item = HealthCode> {
        (0..100).filter_map(|number| HealthCode::try_from(number).ok())
    }

    /// Row: H22.
    #[test]
    fn each_cause_of_the_daemon_is_reported_by_one_side() {
        assert!(all().count() >= 17);
        for code in all() {
            for of_pool in [false, true] {
                let message = code.as_str_name().to_owned();
                let severity = v1::Severity::Failure.into();
                let cause = v1::Cause {
                    code: code.into(),
                    severity,
                    message,
                    of_pool,
                    ..Default::default()
                };
                let sides = [Side::Controller, Side::Node, Side::NodeAlone];
                let counts = sides.map(|side| causes_for(side, std::slice::from_ref(&cause)).len());
                assert_eq!(counts.iter().sum::<usize>(), 1, "{code:?}");
            }
        }
    }

    /// Faults that only the node's own checks can find; the tests of the node part cover them.
    ///
    /// Row: H22.
    #[test]
    fn the_node_itself_detects_devices_and_missing_volumes() {
        let alone: Vec<HealthCode> = all().filter(|code| side(*code) == Side::NodeAlone).collect();
        assert_eq!(alone, [HealthCode::DeviceNotServed, HealthCode::VolumeMissing]);
    }

    /// Row: H22.
    #[test]
    fn the_documents_table_has_each_code_on_its_side() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/KUBERNETES.md");
        let text = std::fs::read_to_string(path).unwrap();
        for code in all().filter(|code| *code != HealthCode::Unspecified) {
            let name = code.as_str_name().trim_start_matches("HEALTH_CODE_");
            let name = format!("`{}`", name.to_lowercase().replace('_', "-"));
            let line = text.lines().find(|line| line.starts_with("| ") && line.contains(&name));
            let line = line.unwrap_or_else(|| panic!("{name} is not in the table"));
            let reporter = if side(code) == Side::Controller { "controller" } else { "node" };
            assert!(line.contains(&format!("| {reporter} |")), "{line}");
        }
    }

    /// Row: H30.
    #[test]
    fn the_documents_name_the_gate_and_the_metric_that_kubelets_export() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/KUBERNETES.md");
        let text = std::fs::read_to_string(path).unwrap();
        for name in [
            "`CSIVolumeHealth`",
            "`kubelet_volume_stats_health_status_abnormal{namespace,persistentvolumeclaim}`",
            "`volume_health_status`",
            "`volume_stats_health_abnormal`",
            "`VolumeConditionAbnormal`",
            "`volumeHealthStats.abnormal`",
            "`blockd_volume_health_abnormal`",
        ] {
            assert!(text.contains(name), "{name} is not explained");
        }
    }

    /// All source files below a folder, with their text.
    fn sources(folder: &Path) -> Vec<(PathBuf, String)> {
        let mut found = Vec::new();
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                found.extend(sources(&path));
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = std::fs::read_to_string(&path).unwrap();
                found.push((path, text));
            }
        }
        found
    }

    /// The extender has one, and is a process of its own: nothing of the plugin's packages uses a
    /// part of it, and nothing else can find an API server.
    ///
    /// Row: H36.
    #[test]
    fn the_plugin_is_built_without_a_client_of_an_api_server() {
        let manifest = include_str!("../../Cargo.toml");
        let begins = |line: &&str| line.starts_with("kube") || line.starts_with("k8s");
        assert_eq!(manifest.lines().find(begins), None);
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let folders = ["src", "base/src", "kata/src"];
        let sources: Vec<_> =
            folders.iter().flat_map(|folder| sources(&root.join(folder))).collect();
        assert!(sources.len() > 40);
        for (path, text) in sources {
            let name = path.strip_prefix(root).unwrap();
            if name == Path::new("src/health/split.rs") {
                continue;
            }
            let mut words = vec!["KUBERNETES_SERVICE", "serviceaccount", "rustls"];
            // The program starts either of them.
            if name != Path::new("src/main.rs") {
                words.push("extender::");
            }
            for word in words {
                assert!(!text.contains(word), "{word} in {}", name.display());
            }
        }
    }

    #[test]
    fn the_controller_reports_codes_of_a_newer_daemon() {
        let newer = v1::Cause { code: 4711, message: "new".to_owned(), ..Default::default() };
        assert_eq!(causes_for(Side::Controller, &[newer]), [Cause::unknown("new")]);
    }
}
