use super::*;

#[test]
fn forwarding_mode_of_a_service_has_priority_over_the_setting_and_external_ips_may_be_off() {
    let service = Service {
        external_ips: vec!["192.0.2.9".parse().unwrap()],
        ..Service::new(ServiceName::new("default", "web"))
    };
    let with =
        |service: &Service, settings| known(service, Vec::new(), settings, &mut Vec::new()).into_owned();
    let annotations = Annotations::ALL;
    let dsr = PlanSettings { forwarding: ForwardingMode::Dsr, annotations, ..PlanSettings::default() };
    assert_eq!(with(&service, dsr).forwarding, Some(ForwardingMode::Dsr));
    assert_eq!(with(&service, PlanSettings::default()).forwarding, None);
    let own = Service { forwarding: Some(ForwardingMode::Hybrid), ..service.clone() };
    assert_eq!(with(&own, dsr).forwarding, Some(ForwardingMode::Hybrid));
    assert_eq!(with(&service, PlanSettings::default()).external_ips, service.external_ips);
    let shut = PlanSettings { no_external_ips: true, ..PlanSettings::default() };
    assert_eq!(with(&service, shut).external_ips, Vec::<IpAddr>::new());
}
