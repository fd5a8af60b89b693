//! CreateVolume: fields, names, repeats, capabilities, parameters.

use anyhow::{Result, ensure};
use blockd_csi::proto::volume_capability::access_mode::Mode;
use blockd_csi::proto::volume_capability::{AccessType, MountVolume};
use blockd_csi::proto::{CreateVolumeRequest, VolumeCapability};
use tonic::Code;

use crate::csi::case::Need::Rows;
use crate::csi::case::{CREATE, LIST, MODES, MODIFY, cases};
use crate::csi::cx::{Cx, block, mounted_as, one, range, refused, says};

cases! { [CREATE]
    create_volume_without_name_is_invalid_argument;
    create_volume_without_capabilities_is_invalid_argument;
    create_volume_without_access_type_is_invalid_argument;
    create_volume_without_access_mode_is_invalid_argument;
    create_volume_with_unknown_access_mode_is_invalid_argument;
    an_undefined_access_mode_is_invalid_argument;
    every_capability_of_create_volume_is_checked;
    volumes_for_several_nodes_are_refused: Rows;
    the_old_single_node_writer_is_accepted;
    the_newer_modes_are_accepted_where_they_are_offered: MODES;
    a_volume_for_one_reader_is_accepted: Rows;
    a_block_volume_is_accepted: Rows;
    an_unknown_file_system_is_invalid_argument: Rows;
    every_file_system_that_was_asked_for_is_accepted: Rows;
    create_volume_again_gives_the_same_volume;
    create_volume_again_with_a_range_that_still_fits_gives_the_same_volume;
    create_volume_again_with_another_size_already_exists;
    create_volume_again_with_a_source_already_exists;
    the_mode_is_no_property_of_a_volume: MODES, Rows;
    two_names_are_two_volumes;
    an_id_has_at_most_128_bytes;
    the_context_of_a_volume_is_within_its_limits;
    a_name_of_128_characters_is_accepted;
    a_name_of_128_characters_of_unicode_is_accepted;
    a_name_of_spaces_and_signs_is_accepted;
    names_that_look_like_paths_are_names;
    long_names_that_differ_at_the_end_are_two_volumes;
    names_that_differ_in_case_are_two_volumes;
    a_name_with_control_characters_is_invalid_argument;
    an_unknown_parameter_is_refused_by_name: Rows;
    an_unknown_device_class_is_refused_by_name: Rows;
    parameters_that_sidecars_add_are_accepted: Rows;
    unused_secrets_are_accepted;
    an_unknown_mutable_parameter_is_refused_at_create: MODIFY;
    refused_calls_leave_nothing_behind: LIST;
}

fn create_volume_without_name_is_invalid_argument(cx: &mut Cx<'_>) -> Result<()> {
    let request = CreateVolumeRequest { name: String::new(), ..cx.request() };
    refused(cx.create(&request), Code::InvalidArgument).map(|_| ())
}

fn create_volume_without_capabilities_is_invalid_argument(cx: &mut Cx<'_>) -> Result<()> {
    let request = CreateVolumeRequest { volume_capabilities: Vec::new(), ..cx.request() };
    refused(cx.create(&request), Code::InvalidArgument).map(|_| ())
}

fn with(cx: &mut Cx<'_>, volume_capabilities: Vec<VolumeCapability>) -> CreateVolumeRequest {
    CreateVolumeRequest { volume_capabilities, ..cx.request() }
}

fn create_volume_without_access_type_is_invalid_argument(cx: &mut Cx<'_>) -> Result<()> {
    let mut capability = cx.mount(Mode::SingleNodeWriter);
    capability.access_type = None;
    let request = with(cx, vec![capability]);
    refused(cx.create(&request), Code::InvalidArgument).map(|_| ())
}

/// Row: W11.
fn create_volume_without_access_mode_is_invalid_argument(cx: &mut Cx<'_>) -> Result<()> {
    let mut capability = cx.mount(Mode::SingleNodeWriter);
    capability.access_mode = None;
    let request = with(cx, vec![capability]);
    refused(cx.create(&request), Code::InvalidArgument).map(|_| ())
}

/// Row: W10.
fn create_volume_with_unknown_access_mode_is_invalid_argument(cx: &mut Cx<'_>) -> Result<()> {
    for capability in [cx.mount(Mode::Unknown), block(Mode::Unknown)] {
        let request = with(cx, vec![capability]);
        refused(cx.create(&request), Code::InvalidArgument)?;
    }
    Ok(())
}

fn an_undefined_access_mode_is_invalid_argument(cx: &mut Cx<'_>) -> Result<()> {
    for mode in [-1, 77] {
        let mut capability = cx.mount(Mode::SingleNodeWriter);
        if let Some(access_mode) = &mut capability.access_mode {
            access_mode.mode = mode;
        }
        let request = with(cx, vec![capability]);
        refused(cx.create(&request), Code::InvalidArgument)?;
    }
    Ok(())
}

/// Row: W9.
fn every_capability_of_create_volume_is_checked(cx: &mut Cx<'_>) -> Result<()> {
    let good = cx.mount(Mode::SingleNodeWriter);
    let bad = cx.mount(Mode::Unknown);
    for both in [vec![good.clone(), bad.clone()], vec![bad, good]] {
        let request = with(cx, both);
        refused(cx.create(&request), Code::InvalidArgument)?;
    }
    Ok(())
}

/// Row: W31.
fn volumes_for_several_nodes_are_refused(cx: &mut Cx<'_>) -> Result<()> {
    let modes =
        [Mode::MultiNodeReaderOnly, Mode::MultiNodeSingleWriter, Mode::MultiNodeMultiWriter];
    for mode in modes {
        for capability in [cx.mount(mode), block(mode)] {
            let good = cx.mount(Mode::SingleNodeWriter);
            let request = with(cx, vec![good, capability]);
            let status = refused(cx.create(&request), Code::InvalidArgument)?;
            says(&status, &[mode.as_str_name()])?;
        }
    }
    Ok(())
}

/// Row: W4.
fn the_old_single_node_writer_is_accepted(cx: &mut Cx<'_>) -> Result<()> {
    let request = with(cx, vec![cx.mount(Mode::SingleNodeWriter)]);
    cx.create(&request)?;
    Ok(())
}

/// Row: W6.
fn the_newer_modes_are_accepted_where_they_are_offered(cx: &mut Cx<'_>) -> Result<()> {
    for mode in [Mode::SingleNodeSingleWriter, Mode::SingleNodeMultiWriter] {
        let request = with(cx, vec![cx.mount(mode)]);
        cx.create(&request)?;
    }
    Ok(())
}

/// Row: W30.
fn a_volume_for_one_reader_is_accepted(cx: &mut Cx<'_>) -> Result<()> {
    let request = with(cx, vec![cx.mount(Mode::SingleNodeReaderOnly)]);
    cx.create(&request)?;
    Ok(())
}

fn a_block_volume_is_accepted(cx: &mut Cx<'_>) -> Result<()> {
    let request = cx.block_request();
    cx.create(&request)?;
    Ok(())
}

fn an_unknown_file_system_is_invalid_argument(cx: &mut Cx<'_>) -> Result<()> {
    let request = with(cx, vec![mounted_as("no-such-fs", Mode::SingleNodeWriter)]);
    let status = refused(cx.create(&request), Code::InvalidArgument)?;
    says(&status, &["no-such-fs"])
}

/// Row: T2.
fn every_file_system_that_was_asked_for_is_accepted(cx: &mut Cx<'_>) -> Result<()> {
    for fs_type in ["", "ext4", "xfs", "btrfs"] {
        let capability = mounted_as(fs_type, Mode::SingleNodeWriter);
        let request = with(cx, vec![capability]);
        cx.create(&request)?;
    }
    Ok(())
}

fn create_volume_again_gives_the_same_volume(cx: &mut Cx<'_>) -> Result<()> {
    let request = cx.request();
    let first = cx.create(&request)?;
    for _ in 0..3 {
        let again = cx.create(&request)?;
        ensure!(first == again, "{first:?} and {again:?}");
    }
    Ok(())
}

fn create_volume_again_with_a_range_that_still_fits_gives_the_same_volume(
    cx: &mut Cx<'_>,
) -> Result<()> {
    let request = cx.request();
    let first = cx.create(&request)?;
    let wider = range(first.capacity_bytes / 2, first.capacity_bytes * 2);
    let again = cx.create(&CreateVolumeRequest { capacity_range: wider, ..request })?;
    ensure!(first == again, "{first:?} and {again:?}");
    Ok(())
}

fn create_volume_again_with_another_size_already_exists(cx: &mut Cx<'_>) -> Result<()> {
    let request = cx.request();
    let first = cx.create(&request)?;
    let larger = range(first.capacity_bytes * 2, first.capacity_bytes * 2);
    let again = CreateVolumeRequest { capacity_range: larger, ..request.clone() };
    refused(cx.create(&again), Code::AlreadyExists)?;
    let again = cx.create(&request)?;
    ensure!(first == again, "the refusal changed it: {first:?} and {again:?}");
    Ok(())
}

fn create_volume_again_with_a_source_already_exists(cx: &mut Cx<'_>) -> Result<()> {
    use blockd_csi::proto::controller_service_capability::rpc::Type as Controller;
    use blockd_csi::proto::volume_content_source::{Type, VolumeSource};
    if !cx.offers().controller.contains(&i32::from(Controller::CloneVolume)) {
        return crate::csi::cx::not_offered("CLONE_VOLUME");
    }
    let source = cx.volume()?;
    let request = cx.request();
    cx.create(&request)?;
    let volume_id = source.volume_id;
    let from = cx.request_from(Type::Volume(VolumeSource { volume_id }));
    let again = CreateVolumeRequest { name: request.name, ..from };
    refused(cx.create(&again), Code::AlreadyExists).map(|_| ())
}

/// Row: W17.
fn the_mode_is_no_property_of_a_volume(cx: &mut Cx<'_>) -> Result<()> {
    let request = cx.request();
    let first = cx.create(&request)?;
    for mode in [Mode::SingleNodeMultiWriter, Mode::SingleNodeWriter] {
        let volume_capabilities = vec![cx.mount(mode)];
        let again = cx.create(&CreateVolumeRequest { volume_capabilities, ..request.clone() })?;
        ensure!(first.volume_id == again.volume_id, "{first:?} and {again:?}");
    }
    Ok(())
}

fn two_names_are_two_volumes(cx: &mut Cx<'_>) -> Result<()> {
    let (first, second) = (cx.volume()?, cx.volume()?);
    ensure!(first.volume_id != second.volume_id, "both are {}", first.volume_id);
    Ok(())
}

fn an_id_has_at_most_128_bytes(cx: &mut Cx<'_>) -> Result<()> {
    let short = cx.volume()?;
    let request = CreateVolumeRequest { name: cx.long_name('x'), ..cx.request() };
    let long = cx.create(&request)?;
    for id in [short.volume_id, long.volume_id] {
        ensure!((1..=128).contains(&id.len()), "{id:?} has {} bytes", id.len());
    }
    Ok(())
}

fn the_context_of_a_volume_is_within_its_limits(cx: &mut Cx<'_>) -> Result<()> {
    let volume = cx.volume()?;
    let context = &volume.volume_context;
    let bytes: usize = context.iter().map(|(key, value)| key.len() + value.len()).sum();
    ensure!(bytes <= 4096, "{bytes} bytes of context");
    let long = context.iter().find(|(key, value)| key.len() > 128 || value.len() > 128);
    ensure!(long.is_none(), "{long:?} is too long");
    Ok(())
}

/// A volume of this name can be made, is made once, and can be deleted.
fn named(cx: &mut Cx<'_>, name: String) -> Result<String> {
    let request = CreateVolumeRequest { name, ..cx.request() };
    let first = cx.create(&request)?;
    let again = cx.create(&request)?;
    ensure!(first == again, "{first:?} and {again:?}");
    ensure!((1..=128).contains(&first.volume_id.len()), "an id of {:?}", first.volume_id);
    Ok(first.volume_id)
}

fn a_name_of_128_characters_is_accepted(cx: &mut Cx<'_>) -> Result<()> {
    let name = cx.long_name('n');
    named(cx, name).map(|_| ())
}

fn a_name_of_128_characters_of_unicode_is_accepted(cx: &mut Cx<'_>) -> Result<()> {
    for fill in ['ß', '漢', '🦀'] {
        let start = cx.name();
        let rest = 128 - start.chars().count();
        let name = format!("{start}{}", fill.to_string().repeat(rest));
        ensure!(name.chars().count() == 128, "a wrong case");
        named(cx, name)?;
    }
    Ok(())
}

fn a_name_of_spaces_and_signs_is_accepted(cx: &mut Cx<'_>) -> Result<()> {
    for sign in [" ", "\t", "\n", "\r", "@", "~", "%", "\"", "\\", ":", "*", "'", "#", "\u{a0}"] {
        let name = format!("{}{sign}{sign}x", cx.name());
        named(cx, name)?;
        let name = format!("{sign}{}{sign}", cx.name());
        named(cx, name)?;
    }
    Ok(())
}

fn names_that_look_like_paths_are_names(cx: &mut Cx<'_>) -> Result<()> {
    let mut ids = Vec::new();
    for (before, after) in [("/", ""), ("../", ""), ("", "/.."), ("a/", "/b"), ("./", "/")] {
        let name = format!("{before}{}{after}", cx.name());
        ids.push(named(cx, name)?);
    }
    for name in [".", "..", "/", "//", "~", "@"] {
        ids.push(named(cx, name.to_owned())?);
    }
    let count = ids.len();
    ids.sort();
    ids.dedup();
    ensure!(ids.len() == count, "two of them are one: {ids:?}");
    Ok(())
}

fn long_names_that_differ_at_the_end_are_two_volumes(cx: &mut Cx<'_>) -> Result<()> {
    let start: String = cx.long_name('x').chars().take(127).collect();
    let first = named(cx, format!("{start}a"))?;
    let second = named(cx, format!("{start}b"))?;
    ensure!(first != second, "both are {first}");
    Ok(())
}

fn names_that_differ_in_case_are_two_volumes(cx: &mut Cx<'_>) -> Result<()> {
    let name = cx.name();
    let first = named(cx, format!("{name}-a"))?;
    let second = named(cx, format!("{name}-A"))?;
    ensure!(first != second, "both are {first}");
    Ok(())
}

fn a_name_with_control_characters_is_invalid_argument(cx: &mut Cx<'_>) -> Result<()> {
    for sign in ['\0', '\u{1}', '\u{8}', '\u{b}', '\u{c}', '\u{1f}', '\u{7f}', '\u{9f}'] {
        let name = format!("{}{sign}", cx.name());
        let request = CreateVolumeRequest { name, ..cx.request() };
        refused(cx.create(&request), Code::InvalidArgument)?;
    }
    Ok(())
}

fn an_unknown_parameter_is_refused_by_name(cx: &mut Cx<'_>) -> Result<()> {
    let own = format!("{}/no-such-key", cx.offers().name);
    for key in ["no-such-key", "example.com/no-such-key", &own, ""] {
        let request = cx.request_with(key, "1");
        let status = refused(cx.create(&request), Code::InvalidArgument)?;
        says(&status, &[key])?;
    }
    Ok(())
}

/// Row: T21.
fn an_unknown_device_class_is_refused_by_name(cx: &mut Cx<'_>) -> Result<()> {
    let key = format!("{}/device-class", cx.offers().name);
    let request = cx.request_with(&key, "no-such-class");
    let status = refused(cx.create(&request), Code::InvalidArgument)?;
    says(&status, &["device-class", "no-such-class"])
}

fn parameters_that_sidecars_add_are_accepted(cx: &mut Cx<'_>) -> Result<()> {
    let mut request = cx.request_with("csi.storage.k8s.io/pvc/name", "claim");
    for (key, value) in [
        ("csi.storage.k8s.io/pvc/namespace", "default"),
        ("csi.storage.k8s.io/pv/name", "pvc-0"),
        ("csi.storage.k8s.io/fstype", "ext4"),
    ] {
        request.parameters.insert(key.to_owned(), value.to_owned());
    }
    // The provisioner takes the file system out of the class, and some leave it to the driver.
    let mount = MountVolume::default();
    request.volume_capabilities[0].access_type = Some(AccessType::Mount(mount));
    cx.create(&request)?;
    Ok(())
}

fn unused_secrets_are_accepted(cx: &mut Cx<'_>) -> Result<()> {
    let request = CreateVolumeRequest { secrets: one("user", "a-secret"), ..cx.request() };
    cx.create(&request)?;
    Ok(())
}

fn an_unknown_mutable_parameter_is_refused_at_create(cx: &mut Cx<'_>) -> Result<()> {
    let mutable_parameters = one("no-such-key", "1");
    let request = CreateVolumeRequest { mutable_parameters, ..cx.request() };
    let status = refused(cx.create(&request), Code::InvalidArgument)?;
    says(&status, &["no-such-key"])
}

fn refused_calls_leave_nothing_behind(cx: &mut Cx<'_>) -> Result<()> {
    let before = cx.driver.everything()?;
    let bad = cx.mount(Mode::Unknown);
    let request = with(cx, vec![bad]);
    refused(cx.create(&request), Code::InvalidArgument)?;
    let request = cx.request_of(-1, 0);
    refused(cx.create(&request), Code::InvalidArgument)?;
    let after = cx.driver.everything()?;
    ensure!(before == after, "{:?}", after.difference(&before));
    Ok(())
}
