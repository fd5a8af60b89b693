//! The privileges of the plugin as a process.

use std::fs;

use super::*;

/// The capabilities of a plugin with both services, as the kernel numbers them: CAP_CHOWN for the
/// endpoint's group, CAP_DAC_OVERRIDE, CAP_SYS_ADMIN and CAP_SYS_RESOURCE.
const KEPT: u64 = 1 << 0 | 1 << 1 | 1 << 21 | 1 << 24;

/// The group of sidecars in the manifests.
const GROUP: &str = "65532";

/// A container's root that can't be written, but for the folders that are mounted there.
const READ_ONLY_ROOT: &str = "mount --make-rprivate /\n\
    mount --bind \"$HOME_FOLDER\" \"$HOME_FOLDER\"\n\
    mount --options remount,bind,ro /\n\
    exec \"$@\"";

/// A number of a process's status.
fn value(status: &str, name: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    u64::from_str_radix(line.trim(), 16).unwrap()
}

/// Row: P40.
#[test]
fn the_plugin_keeps_the_capabilities_that_it_needs_and_writes_in_its_folders_only() {
    assert!(nix::unistd::geteuid().is_root(), "not run: capabilities are those of root");
    let settings = Settings {
        launcher: READ_ONLY_ROOT.to_owned(),
        words: ["--endpoint-group", GROUP].map(str::to_owned).into(),
        ..Settings::default()
    };
    let rig = Rig::start("privileges", &settings).unwrap();
    let process = format!("/proc/{}", rig.plugin.pid().unwrap());
    let mounts = fs::read_to_string(format!("{process}/mountinfo")).unwrap();
    let root = mounts.lines().find(|line| line.split(' ').nth(4) == Some("/")).unwrap();
    assert!(root.split(' ').nth(5).unwrap().split(',').any(|word| word == "ro"), "{root}");
    // The root of a container, as this machine may be, has less than that of a host.
    let own = fs::read_to_string("/proc/self/status").unwrap();
    let status = fs::read_to_string(format!("{process}/status")).unwrap();
    for name in ["CapPrm:", "CapEff:", "CapBnd:"] {
        assert_eq!(value(&status, name), KEPT & value(&own, name), "{name} {status}");
    }
    assert_eq!((value(&status, "CapInh:"), value(&status, "NoNewPrivs:")), (0, 1), "{status}");
    // All of its threads, since a kernel has capabilities for each.
    for thread in fs::read_dir(format!("{process}/task")).unwrap() {
        let status = fs::read_to_string(thread.unwrap().path().join("status")).unwrap();
        assert_eq!(value(&status, "CapEff:"), KEPT & value(&own, "CapEff:"), "{status}");
    }
    let driver = rig.plugin.driver().unwrap();
    let volume = create(&driver, &request("a", block(Mode::SingleNodeWriter), 8 * MIB)).unwrap();
    delete(&driver, &volume.volume_id).unwrap();
    // A sidecar with the group of the endpoint gets in, and nothing else of that user does.
    let connect = |group: &str| {
        let socket = rig.plugin.socket();
        let mut command = std::process::Command::new("setpriv");
        command.args(["--reuid", GROUP, "--regid", group, "--clear-groups", "test", "-w"]);
        command.arg(socket).status().unwrap().success()
    };
    assert!(connect(GROUP));
    assert!(!connect("65531"));
}
