//! Volumes in persistent memory: the kernel's own devices, DAX, and images for virtual machines.

use std::path::Path;

use tonic::Code;

use super::{ID, Node, SIZE, STAGING, code, file_system, node, spec, target};
use crate::capability::Mode;
use crate::node::kata;
use crate::node::modes::Access;
use crate::node::stage;
use crate::node::steps::FileSystemSpec;
use crate::node::testing::{Fake, Held};
use crate::node::world::{Result, Volumes as _, World};

/// A volume whose device is the kernel's own.
fn own(held: Held) -> Node {
    let world = Fake::default();
    let place = world.add_own("csi.a", SIZE, held);
    Node { world, place }
}

impl Node {
    fn stage_mapped(&self, mode: Mode) -> Result<()> {
        let spec = FileSystemSpec { dax: true, ..spec("ext4") };
        let (place, path) = (&self.place, Path::new(STAGING));
        let request = stage::Request { volume: ID, place, path, mode, spec: Some(&spec) };
        stage::stage(&self.world.as_world(), &request)
    }
}

/// Row: P23.
#[test]
fn a_file_system_without_dax_is_no_app_direct_and_does_not_stay() {
    for mode in [Mode::Writer, Mode::ReaderOnly] {
        // xfs goes on without, and says so in the kernel's log alone.
        let node = own(file_system("ext4"));
        node.world.state().no_dax = true;
        let error = node.stage_mapped(mode).unwrap_err();
        assert_eq!(error.code(), Code::FailedPrecondition);
        assert!(error.to_string().contains("without DAX, which usage AppDirect needs"), "{error}");
        assert!(node.world.state().mounts.is_empty(), "{mode:?}");
        node.world.state().no_dax = false;
        node.stage_mapped(mode).unwrap();
        assert!(node.world.state().mounts[0].dax, "{mode:?}");
        // Nor does a device of the daemon's have any.
        let node = self::node(file_system("ext4"));
        assert_eq!(code(node.stage_mapped(mode)), Code::FailedPrecondition);
        assert!(node.world.state().mounts.is_empty(), "{mode:?}");
        // Without DAX in the spec it is mounted as usual.
        let node = own(file_system("ext4"));
        node.stage(mode, "ext4").unwrap();
        assert!(!node.world.state().mounts[0].dax, "{mode:?}");
    }
}

/// Row: P22.
#[test]
fn the_kernels_own_device_is_shown_and_can_be_written_again_afterwards() {
    let node = own(Held::Raw);
    let reader = target("/t/1", Mode::ReaderOnly, Access::Block);
    node.stage_at(STAGING, Mode::ReaderOnly, None).unwrap();
    node.publish(&reader).unwrap();
    assert!(node.world.state().volumes["csi.a"].read_only);
    node.unpublish("/t/1").unwrap();
    node.unstage().unwrap();
    let state = node.world.state();
    assert!(!state.volumes["csi.a"].read_only && state.volumes["csi.a"].minor.is_some());
    assert_eq!(state.volumes["csi.a"].held, Held::Raw);
    assert!(state.mounts.is_empty() && state.records.is_empty());
}

#[test]
fn the_content_of_the_kernels_own_device_is_detected_by_reading() {
    // The daemon does not see writes to that device.
    let node = own(Held::Raw);
    let error = node.stage_mapped(Mode::Writer).unwrap_err();
    assert!(error.to_string().contains("left as it is"), "{error}");
    assert_eq!(node.world.state().volumes["csi.a"].held, Held::Raw);
}

/// Row: P27.
#[test]
fn the_content_of_an_image_is_mounted_through_the_outer_file_system() {
    let node = own(Held::Nothing);
    node.stage_image(true).unwrap();
    let kinds = |node: &Node| {
        let state = node.world.state();
        let entries = state.mounts.iter();
        entries.map(|it| (it.path.clone(), it.kind.clone(), it.dax)).collect::<Vec<_>>()
    };
    let around = (Path::new("/vm/csi.a").to_path_buf(), "ext4".to_owned(), true);
    let shown = (Path::new(STAGING).to_path_buf(), "xfs".to_owned(), false);
    assert_eq!(kinds(&node), [around, shown.clone()]);
    assert!(node.world.record(ID).unwrap().kata);
    // With another usage than AppDirect it works without DAX too.
    let without = self::node(Held::Nothing);
    without.stage_image(false).unwrap();
    let around = (Path::new("/vm/csi.a").to_path_buf(), "ext4".to_owned(), false);
    assert_eq!(kinds(&without), [around, shown]);
    // A lost record is recognised by the mount.
    node.world.forget(ID).unwrap();
    node.unstage_image().unwrap();
    assert!(node.world.state().mounts.is_empty());
    let state = node.world.state();
    let image = state.volumes["csi.a"].image.as_deref().unwrap();
    assert!(image.minor.is_none() && matches!(image.held, Held::FileSystem { .. }));
}

impl Node {
    fn stage_image(&self, app_direct: bool) -> Result<()> {
        let spec = spec("xfs");
        let asked = Some(kata::ImageSpec { partition: false, app_direct });
        let (place, path) = (&self.place, Path::new(STAGING));
        let request =
            stage::Request { volume: ID, place, path, mode: Mode::Writer, spec: Some(&spec) };
        kata::through(&self.world.as_world(), ID, place, asked, |world| {
            stage::stage(world, &request)
        })
    }

    fn unstage_image(&self) -> Result<()> {
        let act = |world: &World<'_>| stage::unstage(world, ID, &self.place, Path::new(STAGING));
        kata::through(&self.world.as_world(), ID, &self.place, None, act)
    }
}

#[test]
fn app_direct_image_is_refused_on_a_file_system_without_dax() {
    let lacking = own(Held::Nothing);
    lacking.world.state().no_dax = true;
    for (what, node) in [("a device of ublk", node(Held::Nothing)), ("no DAX there", lacking)] {
        for _ in 0..2 {
            let error = node.stage_image(true).unwrap_err();
            assert_eq!(error.code(), Code::FailedPrecondition, "{what}");
            let text = error.to_string();
            assert!(text.contains("kataContainers is true"), "{what}: {text}");
            assert!(text.contains("usage AppDirect needs DAX"), "{what}: {text}");
            assert!(text.contains("class of kind pmem-direct"), "{what}: {text}");
            let state = node.world.state();
            assert!(state.mounts.is_empty(), "{what}: {:?}", state.mounts);
            assert!(state.volumes["csi.a"].image.is_none(), "{what}");
        }
        node.unstage_image().unwrap();
        let state = node.world.state();
        assert!(state.records.is_empty() && state.paths.is_empty(), "{what}");
    }
    let node = own(Held::Nothing);
    node.stage_image(true).unwrap();
    assert!(node.world.state().mounts[0].dax);
}

#[test]
fn existing_image_without_dax_stays_mounted_is_not_staged_again_and_keeps_its_data() {
    let node = node(Held::Nothing);
    // As staged by a release that did not check for DAX.
    node.stage_image(false).unwrap();
    let set_data = |value: bool| {
        let mut state = node.world.state();
        let image = state.volumes.get_mut("csi.a").unwrap().image.as_deref_mut().unwrap();
        let Held::FileSystem { data, .. } = &mut image.held else { panic!("{:?}", image.held) };
        std::mem::replace(data, value)
    };
    set_data(true);
    let mounts = node.world.state().mounts.clone();
    // The kubelet repeats the request while the pod runs.
    node.stage_image(true).unwrap();
    assert_eq!(node.world.state().mounts, mounts);
    node.unstage_image().unwrap();
    let error = node.stage_image(true).unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition);
    assert!(error.to_string().contains("the data is kept"), "{error}");
    assert!(node.world.state().mounts.is_empty());
    node.unstage_image().unwrap();
    // To copy the data.
    node.stage_image(false).unwrap();
    assert!(set_data(true), "the data is gone");
}
