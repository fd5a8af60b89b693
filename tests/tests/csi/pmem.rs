//! The plugin with a class in persistent memory: a pool of extents that is mapped, on tmpfs.

use std::path::Path;

use blockd_testkit::folder::Folder;

use super::*;

/// All of it is taken at once, and lies in the host's memory.
const POOL_MIB: u64 = 384;

const CLASS_IN_MEMORY: &str = r#"
[[class]]
name = "pmem"
default = true
kind = "pmem-pooled"
"#;

/// The part of the suite about persistent memory that needs no device.
///
/// Rows: P14, P45.
#[test]
fn a_pool_on_tmpfs_has_the_rows_of_persistent_memory() {
    let folder = Folder::below(Path::new("/dev/shm"), "csi-pmem").unwrap();
    let daemon = daemon::Settings {
        pool: Some(folder.path().join("pool")),
        pool_size: POOL_MIB << 20,
        pool_lines: "kind = \"pmem\"\n".to_owned(),
        ..daemon::Settings::default()
    };
    let config = CLASS_IN_MEMORY.to_owned();
    let rig = Rig::start("pmem", &Settings { daemon, config, ..Settings::default() }).unwrap();
    let cases: Vec<&str> = csi::list()
        .into_iter()
        .filter(|(_, file)| file.ends_with("/pmem.rs"))
        .map(|(name, _)| name)
        .collect();
    let mut passed = 0;
    for name in &cases {
        let only = Some((*name).to_owned());
        let report = csi::run(&csi::Options { only, size: 32 * MIB, ..rig.options() }).unwrap();
        let is_not_run = |one: &csi::Outcome| matches!(one.verdict, csi::Verdict::NotRun(_));
        if report.outcomes.iter().all(is_not_run) {
            continue;
        }
        report.print(false);
        assert!(report.is_good() && report.not_offered() == 0, "{name}: {report:?}");
        passed += report.passed();
    }
    // Three of them stage something.
    assert_eq!((passed, cases.len()), (9, 12));
    assert_eq!(rig.control().unwrap().names().unwrap(), [""; 0]);
    // It is on tmpfs, and reported as no more than that.
    let driver = rig.plugin.driver().unwrap();
    let made = create(&driver, &request("level", mounted("ext4"), 5 * MIB)).unwrap();
    let context = &made.volume_context;
    assert_eq!(context["csi.blockd.io/durability"], "restart-safe");
    assert_eq!(context["csi.blockd.io/usage"], "FileIO");
    assert_eq!(made.capacity_bytes, 32 * MIB);
    delete(&driver, &made.volume_id).unwrap();
}

#[test]
fn a_pool_of_a_file_is_no_pool_for_a_class_in_persistent_memory() {
    let rig = rig("no-pmem", 256, CLASS_IN_MEMORY);
    let driver = rig.plugin.driver().unwrap();
    let answer = create(&driver, &request("none", mounted("ext4"), 32 * MIB));
    let status = refused(answer, Code::FailedPrecondition).unwrap();
    assert!(status.message().contains("is not in persistent memory"), "{status}");
    assert_eq!(free(&driver, "pmem"), 0);
}
